"""Assignment of orders to optimizers, for checkpoints with several optimizers that each number from 0."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches

from labkit.checkpoint.contents.entry_names import DROP_ADVICE
from labkit.checkpoint.contents.flat import ParameterList
from labkit.checkpoint.errors import FQNMismatchError
from labkit.checkpoint.index.model import Path_
from labkit.checkpoint.wording import listed

#: The names of one optimizer's parameters in its order, or a dict of such names by optimizer key.
Order = Sequence[str] | Mapping[str, Sequence[str]]


def orders_of(
    path: object,
    order: Order | None,
    numbers: Mapping[Path_, Sequence[int]],
    named: Collection[Path_],
    parameters: ParameterList | None,
) -> dict[Path_, Sequence[str]]:
    """Return the order for each optimizer that was given one.

    Args:
        path: The checkpoint, for messages.
        order: What the user gave.
        numbers: The numbers of each numbered optimizer, by its path.
        named: The optimizers that recorded their parameters' names.
        parameters: The model's parameters, if there is a model.

    Raises:
        FQNMismatchError: An order matches no optimizer; there are several optimizers, and nothing says what one's numbers mean; or
            one lists a number twice.
    """
    roots = {".".join(map(str, root)): root for root in numbers}
    for text, root in roots.items():
        if len(set(numbers[root])) < len(numbers[root]):
            raise FQNMismatchError(path, problems=[f"{text} lists a parameter's number twice"], advice=DROP_ADVICE)
    if isinstance(order, Mapping):
        strange = [text for text in order if text not in roots]
        if strange:
            near = {text: get_close_matches(text, roots, 1) for text in strange}
            raise FQNMismatchError(
                path,
                problems=[
                    f"order is for {text}, but no optimizer with numbers is there"
                    + (f" (did you mean {near[text][0]}?)" if near[text] else "")
                    for text in strange
                ],
                advice=f"Its optimizers with numbers are {listed([*roots])}.",
            )
        orders = {roots[text]: names for text, names in order.items()}
    else:
        orders = {} if order is None or len(roots) > 1 else dict.fromkeys(roots.values(), order)
    counts = set() if parameters is None else {len(parameters.shapes), len(parameters.trainable)}
    dark = [root for root in numbers if root not in orders and root not in named and len(numbers[root]) not in counts]
    if len(roots) > 1 and (dark or (order is not None and not orders)):
        raise _several(path, list(roots))
    return orders


def _several(path: object, roots: Sequence[str]) -> FQNMismatchError:
    rest = {root: " ".join(f"--drop '{other}.*'" for other in roots if other != root) for root in roots[:3]}
    each = "; ".join(f"{drops} keeps {root}" for root, drops in rest.items())
    options = " ".join(f"--order {root}=FILE" for root in roots)
    return FQNMismatchError(
        path,
        problems=[f"{listed(roots)} each number the parameters in their own way, so one number means several"],
        advice="Give each an order of its own: the names of that optimizer's parameters, one per line, in its order, as in "
        f"the model that it trains: order={{...}} ({options}). `labkit checkpoint migrate --help` shows how to write such a "
        f"file. Or leave the others out: {each}.",
    )
