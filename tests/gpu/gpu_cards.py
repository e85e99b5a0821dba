"""Which card of the tables a GPU is."""

from memplan.backends.environment import gpu
from memplan.errors import MemplanError
from memplan.spec import DeviceSpec
from memplan.spec.device import card, cards, kin_of


def card_of(name: str) -> str:
    """The card of the tables whose rules hold on the GPU called `name`; MemplanError where none is near."""
    found = kin_of(name)
    if found is None:
        raise MemplanError(f"No rules are known for {name!r}.", f"Type --card with one of {', '.join(cards())}.")
    return found


def card_here() -> DeviceSpec:
    """The card that is in this machine."""
    facts = gpu()
    if facts is None:
        raise MemplanError("There is no CUDA device here.", "Type .ci/gpu --dry-run to rehearse on the CPU.")
    return card(card_of(facts["gpu"]))
