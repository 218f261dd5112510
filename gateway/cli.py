"""The `cellgate` command."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, CliApp, CliSubCommand, CliToggleFlag, SettingsConfigDict, SettingsError

from gateway.checkpoint_commands import CheckpointCommands
from gateway.format_commands import ExportCheckpoint, ImportCheckpoint
from gateway.serve import serve
from gateway.settings import GatewayProcessSettings, ServeSettings


class Serve(ServeSettings):
    """Serve: start and supervise the gateway and a trainer cell on this host."""

    def cli_cmd(self) -> None:
        sys.exit(serve(self))


class Gateway(GatewayProcessSettings):
    """Run the gateway alone; a trainer cell started apart dials its socket."""

    def cli_cmd(self) -> None:
        # Only this command needs a web framework, and it takes its time to import.
        from gateway.assembly import run

        sys.exit(run(self))


class Config(ServeSettings):
    """Print what `cellgate serve` with the same options and environment would use; secrets are masked."""

    def cli_cmd(self) -> None:
        sys.stdout.write(json.dumps(self.shown(), indent=2) + "\n")


class Cellgate(BaseSettings):
    """A self-hosted training service for the tinker SDK."""

    # A prefix of its own: CELLGATE_CHECKPOINTS is an option of the subcommands and not the subcommand of that name.
    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix="CELLGATE_COMMAND_",
        hide_input_in_errors=True,
        cli_prog_name="cellgate",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )

    version: CliToggleFlag[bool] = Field(False, description="print the version")
    serve: CliSubCommand[Serve] = Field(description="the gateway and a trainer cell on this host")
    gateway: CliSubCommand[Gateway] = Field(description="the gateway alone")
    config: CliSubCommand[Config] = Field(description="print the options in force")
    import_: CliSubCommand[ImportCheckpoint] = Field(alias="import", description="make a checkpoint of another's files")
    export: CliSubCommand[ExportCheckpoint] = Field(description="write a checkpoint in another format")
    checkpoints: CliSubCommand[CheckpointCommands] = Field(description="look at checkpoints on disk")

    def cli_cmd(self) -> None:
        if self.version:
            sys.stdout.write(f"cellgate {version('cellgate')}\n")
        else:
            CliApp.run_subcommand(self)


def main(arguments: list[str] | None = None) -> None:
    """Exit status 2 for options that cannot be used; nothing has been touched then."""
    try:
        CliApp.run(Cellgate, cli_args=sys.argv[1:] if arguments is None else arguments)
    except ValidationError as error:
        for problem in error.errors(include_input=False, include_url=False):
            option = str(problem["loc"][-1]).replace("_", "-") if problem["loc"] else "options"
            sys.stderr.write(f"cellgate: --{option}: {problem['msg'].removeprefix('Value error, ')}\n")
        sys.exit(2)
    except SettingsError as error:
        sys.stderr.write(f"cellgate: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
