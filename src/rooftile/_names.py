"""A name that is not in a table: the error that lists its near matches, the same for every table."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from rooftile.errors import UsageError

__all__ = ["unknown_name"]


def unknown_name(kind: str, name: str, known: Sequence[str], *, see: str = "") -> UsageError:
    """The error to raise for ``name``: near matches if there are any, else every known name.

    ``kind`` is what the table holds ("device"), ``see`` an optional last clause that says where to look.
    """
    # A prefix is a near match however long the rest is: "h100" means one of h100-sxm, h100-pcie, h100-nvl.
    spelled = {other.lower(): other for other in known}
    near = [other for lower, other in spelled.items() if name and lower.startswith(name.lower())]
    close = difflib.get_close_matches(name.lower(), list(spelled), n=4, cutoff=0.5)
    near += [spelled[match] for match in close if spelled[match] not in near]
    listed = f"near matches: {', '.join(near)}" if near else f"known: {', '.join(known)}"
    return UsageError(f"unknown {kind} {name!r}; {listed}{'; ' + see if see else ''}")
