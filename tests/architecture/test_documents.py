"""What is written for people agrees with the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from gateway.settings import ServeSettings

ROOT = Path(__file__).resolve().parents[2]


def option(field: str) -> str:
    return "--" + field.replace("_", "-")


def test_the_readme_lists_every_option_and_no_other() -> None:
    rows = re.findall(r"^\| `(--[a-z-]+)`", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert sorted(rows) == sorted(option(field) for field in ServeSettings.model_fields)


def test_the_readme_tells_the_defaults_of_plain_options() -> None:
    readme = (ROOT / "README.md").read_text()
    for name, field in ServeSettings.model_fields.items():
        if isinstance(field.default, (int, str)) and not isinstance(field.default, bool):
            assert f"| `{option(name)}` | `{field.default}` |" in readme


def test_files_the_documents_link_to_exist() -> None:
    for document in ROOT.glob("*.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            assert target.startswith("https://") or (ROOT / target).exists(), f"{document.name}: {target}"


def test_images_copy_only_what_is_there_and_is_sent_to_the_build() -> None:
    sent = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"}
    for dockerfile in (ROOT / "docker").glob("*.Dockerfile"):
        for line in re.findall(r"^COPY (.+)$", dockerfile.read_text(), flags=re.MULTILINE):
            sources = [word for word in line.split()[:-1] if not word.startswith("--")]
            assert all((ROOT / source).exists() and source.split("/")[0] in sent for source in sources), line


def test_every_dependency_is_pinned_by_the_constraints() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {normal(name): version for name, _, version in (line.partition("==") for line in lines)}
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(pins[normal(requirement.name)]), requirement


def normal(name: str) -> str:
    return name.lower().replace("_", "-")
