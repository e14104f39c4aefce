"""Which rules there are: every module of this package that is named after a code has a ``RULE``."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import cast

from rooftile._names import unknown_name
from rooftile.errors import UsageError
from rooftile.rules.finding import FAMILIES, Context, Family, Finding, Rule

__all__ = ["all_rules", "check_all", "matches", "rule", "select_rules"]

_RULE_MODULE = re.compile(r"[a-z]{3}\d{3}_\w+")
_SEVERITIES = ("error", "warning", "note")


@cache
def all_rules() -> tuple[Rule, ...]:
    """Every rule, sorted by code; adding a rule is adding one file."""
    package = importlib.import_module("rooftile.rules")
    found: list[Rule] = [
        importlib.import_module(f"rooftile.rules.{module.name}").RULE
        for module in pkgutil.iter_modules(package.__path__)
        if _RULE_MODULE.fullmatch(module.name)
    ]
    return tuple(sorted(found, key=lambda r: r.code))


def rule(code: str) -> Rule:
    """The rule called ``code``, in any case; UsageError with near matches if there is none."""
    for candidate in all_rules():
        if candidate.code == code.upper():
            return candidate
    raise unknown_name("rule", code.upper(), [r.code for r in all_rules()], see="`rooftile explain` lists all")


def select_rules(select: Iterable[str] = (), ignore: Iterable[str] = ()) -> tuple[Rule, ...]:
    """The rules of ``select`` (all if empty) without those of ``ignore``, each a code or a family.

    Raises UsageError for a word that is neither, and for a family in ``select`` that has no rule.
    """
    chosen, left_out = [_checked(word) for word in select], [_checked(word) for word in ignore]
    for word in chosen:
        if not any(matches(r.code, word) for r in all_rules()):
            has = ", ".join(dict.fromkeys(r.family for r in all_rules()))
            raise UsageError(
                f"the family {word} ({FAMILIES[cast(Family, word)]}) has no rules; those with rules are {has}"
            )
    return tuple(
        r
        for r in all_rules()
        if (not chosen or any(matches(r.code, word) for word in chosen))
        and not any(matches(r.code, word) for word in left_out)
    )


def matches(code: str, word: str) -> bool:
    """Whether ``word``, a code, a family or ``any``, takes in ``code``."""
    return word.lower() == "any" or code.startswith(word.upper())


def check_all(context: Context, rules: Sequence[Rule] | None = None) -> tuple[Finding, ...]:
    """All findings, the gravest first, then those whose response saves most."""
    findings = [f for r in (all_rules() if rules is None else rules) for f in r.check(context)]
    return tuple(sorted(findings, key=_weight))


def _weight(finding: Finding) -> tuple[int, int, int, str]:
    saving = finding.saving
    return _SEVERITIES.index(finding.severity), -(saving.peak_bytes or 0), -(saving.moved_bytes or 0), finding.code


def _checked(word: str) -> str:
    known = [*FAMILIES, *(r.code for r in all_rules())]
    if word.upper() in known:
        return word.upper()
    raise unknown_name("rule or family", word.upper(), known, see="`rooftile explain` lists all")
