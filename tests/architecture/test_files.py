"""Files are small and named for what they own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("gateway", "trainer_cell", "openapi", "examples", "bench")
MOST_LINES = 300
BANNED = frozenset({"utils", "helpers", "common", "base", "manager", "handler", "service", "core", "misc"})


def sources(root: Path) -> Iterator[Path]:
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*.py")):
            if not path.name.endswith("_pb2.py"):
                yield path


def too_long(root: Path) -> list[str]:
    lengths = {path: len(path.read_text().splitlines()) for path in sources(root)}
    return [f"{path.relative_to(root)}: {length} lines" for path, length in lengths.items() if length > MOST_LINES]


def misnamed(root: Path) -> list[str]:
    named = {(path.relative_to(root), part) for path in sources(root) for part in path.relative_to(root).parts}
    return sorted(str(path) for path, part in named if part.removesuffix(".py") in BANNED)


def test_no_source_file_is_over_300_lines() -> None:
    assert too_long(ROOT) == []


def test_no_source_file_or_folder_has_a_name_that_says_nothing() -> None:
    assert misnamed(ROOT) == []


def test_a_long_or_misnamed_file_would_be_found(tmp_path: Path) -> None:
    (tmp_path / "gateway/core").mkdir(parents=True)
    (tmp_path / "gateway/utils.py").write_text("")
    (tmp_path / "gateway/core/queue.py").write_text("\n" * 301)
    (tmp_path / "gateway/wire_pb2.py").write_text("\n" * 999)
    assert too_long(tmp_path) == ["gateway/core/queue.py: 301 lines"]
    assert misnamed(tmp_path) == ["gateway/core/queue.py", "gateway/utils.py"]
