"""The verbs as a typer application: what explains them, and says what is wrong with the words that were typed."""

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NoReturn, get_args

import typer

from memplan.cli_options import Argument, Verb
from memplan.errors import MemplanError

WRONG_USAGE: Any = typer.BadParameter.__base__
"""What the parser raises for words that it cannot read: click's UsageError, of whichever click typer has."""
GROUPS = {"baseline": "Keep results to compare later ones with."}
"""Verbs of two words by their first one, with what the help says of it."""


def application(verbs: Mapping[str, Verb]) -> typer.Typer:
    """The command line of `verbs`, by what is typed for each."""
    app = typer.Typer(
        name="memplan",
        help="What fits on the card: estimate, trace and measure the memory of a training step.",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        no_args_is_help=True,
        callback=lambda: None,  # or else a single verb would be no verb
    )
    groups: dict[str, typer.Typer] = {}
    for words, verb in verbs.items():
        group, _, name = words.rpartition(" ")
        if group and group not in groups:
            groups[group] = typer.Typer(name=group, help=GROUPS[group], no_args_is_help=True)
            app.add_typer(groups[group])
        (groups[group] if group else app).command(name)(called(verb))
    return app


NUMBERS = {int: ("a whole number", "4"), float: ("a number", "0.5")}
"""What options of a kind take, and one of them."""


def call(verbs: Mapping[str, Verb], words: list[str]) -> NoReturn:
    """Runs the one of `verbs` that `words` name, and ends with its exit code; MemplanError for what nobody can read."""
    typed = next((name for name in verbs if words[: len(name.split())] == name.split()), "")
    try:
        code = application(verbs)(words, standalone_mode=False)
    except WRONG_USAGE as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
            sys.exit(error.exit_code)
        name = getattr(getattr(error, "param", None), "name", None)
        if isinstance(error, typer.BadParameter) and typed and (said := number_wanted(verbs[typed], name)):
            raise MemplanError(*said) from None
        text = error.format_message()
        help_of = " ".join(["memplan", *typed.split(), "--help"])
        hint = "" if "Did you mean" in text else f"Type {help_of} to see what there is."
        raise MemplanError(text if text.endswith((".", "?")) else f"{text}.", hint) from None
    sys.exit(code if isinstance(code, int) else 0)


def number_wanted(verb: Verb, name: str | None) -> tuple[str, str] | None:
    """What to say of the option `name` of `verb` where it takes a number, and got something else."""
    for one in verb.takes():
        kind, said = get_args(one.annotation)
        number = NUMBERS.get((get_args(kind) or (kind,))[0])
        if one.name == name and number and not isinstance(said, Argument):
            return f"{said.flags[0]} takes {number[0]}.", f"Type {said.flags[0]} {number[1]}."
    return None


def called(verb: Verb) -> Callable[..., None]:
    """`verb` as typer reads it, its options in a signature."""

    def run(**values: Any) -> None:
        verb.run(**values)

    taken = [one.replace(annotation=typed(one.annotation)) for one in verb.takes()]
    run.__doc__ = verb.run.__doc__
    run.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in taken}
    return run


def typed(annotation: Any) -> Any:
    """What typer calls an option or an argument."""
    kind, said = get_args(annotation)
    if isinstance(said, Argument):
        return Annotated[kind, typer.Argument(help=said.help, metavar=said.metavar)]
    return Annotated[kind, typer.Option(*said.flags, help=said.help, show_default=said.shows_default)]
