"""The verbs as a typer application: what explains them, and says what is wrong with the words that were typed."""

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_args

import typer

from memplan.cli_options import Argument, Verb

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
