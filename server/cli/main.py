"""The `novainfer` command. Commands are imported when they are called, so that `novainfer --help` is there at once.

Whatever a user gets wrong is one sentence on stderr and exit code 2; a model that cannot be loaded, too.
"""

from __future__ import annotations

import re
import sys
from importlib import import_module

import click

from novainfer import EngineConfig, InvalidParameter, ModelLoadError, NovaInferError, __version__
from novainfer.process import settle
from novainfer.server.cli.flags import setting_in
from novainfer.server.settings import LogSettings, ServerSettings
from novainfer.setting import settings_of

EXIT_USAGE = 2
EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130

# name -> where it is, and what it is for
COMMANDS = {
    "serve": ("novainfer.server.cli.serve:serve", "Serve a model over OpenAI's HTTP API (HTTP/1.1 and HTTP/2)."),
    "chat": ("novainfer.server.cli.chat:chat", "Talk to a model in the terminal."),
    "generate": ("novainfer.server.cli.generate:generate", "Answer a JSONL file of prompts with a JSONL file."),
    "doctor": ("novainfer.server.cli.doctor:doctor", "Say what this machine can do, and what stands in the way."),
    "bench": ("novainfer.bench.cli:bench", "Measure speed, beside the roofline and transformers."),
    "keys": ("novainfer.server.cli.keys:keys", "Add, list and revoke the API keys of a server."),
    "replay": ("novainfer.server.cli.replay:replay_command", "Run a flight recorder's file again, without a model."),
    "simulate": ("novainfer.server.cli.simulate:simulate", "Run the scheduler under a seeded simulator with faults."),
}


class LazyGroup(click.Group):
    """A group whose commands are imported only to run them or to show their own help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        try:
            command = getattr(import_module(module), attribute)
        except ModuleNotFoundError as error:
            if error.name is None or not module.startswith(error.name):
                raise
            raise click.ClickException(f"{cmd_name} is not part of this build of NovaInfer") from None
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="novainfer")
def novainfer() -> None:
    """LLM inference for Qwen2, Qwen3, Llama and Mistral models: a server, a terminal chat, batches and benchmarks.

    Without a model, all of them use the small one that comes with NovaInfer.
    """


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    settle()
    try:
        result = novainfer.main(argv, prog_name="novainfer", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else "", err=True)
        return EXIT_USAGE
    except click.exceptions.Abort:
        return EXIT_INTERRUPTED
    except click.ClickException as error:
        click.echo(f"Error: {error.format_message()}", err=True)
        return error.exit_code
    except (InvalidParameter, ModelLoadError) as error:
        click.echo(f"Error: {as_flags(error)}{_notes(error)}", err=True)
        return EXIT_USAGE
    except NovaInferError as error:
        click.echo(f"Error: {error.message}{_notes(error)}", err=True)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return result if isinstance(result, int) else 0


def _notes(error: NovaInferError) -> str:
    """Where the value came from, if it was not typed (`Grouped`)."""
    return "".join(f" ({note})" for note in getattr(error, "__notes__", ()))


def as_flags(error: NovaInferError) -> str:
    """The message with settings named as flags: "max_num_seqs must be …" becomes "--max-num-seqs must be …".

    A setting that the message does not begin with stands before it. Words that only look like one are left alone.
    """
    first, space, rest = error.message.partition(" ")
    field = setting_in(error)
    if field is None or field in _ARGUMENTS:
        return error.message
    rest = _SETTING.sub(lambda found: flag_of(found[0]), rest)
    if first.rstrip(":") == field:
        return f"{flag_of(field)}{first[len(field) :]}{space}{rest}"
    return f"{flag_of(field)}: {error.message}"


def flag_of(field: str) -> str:
    """The flag that sets this field."""
    return _FLAGS.get(field) or f"--{field.replace('_', '-')}"


# The first has five flags and an argument, the second is an argument of `keys`: their messages name them.
_ARGUMENTS = ("model", "name")
_RECORDS = (EngineConfig, ServerSettings, LogSettings)
_SETTINGS = frozenset(name for record in _RECORDS for name in record.__struct_fields__)
# Names with an underscore are no words; where one is part of a path it is no setting either.
_SETTING = re.compile(
    r"(?<![\w./-])(?:" + "|".join(name for name in sorted(_SETTINGS) if "_" in name) + r")(?![\w./-])"
)
_FLAGS = {setting.name: setting.flag for record in _RECORDS for setting in settings_of(record) if setting.flag}

if __name__ == "__main__":
    sys.exit(main())
