"""Run every golden case of the folder against this project.

How an area plugs in. A data file `<stem>.json` is judged by `check_<stem>.py` beside this file and by any `check_<stem>_*.py`.
Each holds

    CHECKS: dict[str, Callable[[Case], None]] = {"<kind>": check_kind, ...}

and a check asserts; it returns nothing. A kind belongs to one module; `<reference>_*` stands for the kinds of a reference that no check
names (its settings say which loss they are). Modules are imported when a case needs them, so a broken one fails
its own cases only. An unknown file or kind fails: never skip.

A check is driven by the file alone: same kinds, other names and other parameters will come. It never looks at `case.name`; it
reads every key of `case.params`, `case.inputs` and `case.expected` that is given (not null), and honours it. A key left unread fails the
test afterwards. A key that is understood and changes nothing is named with `case.params.without_effect("key")` and a comment that
says why. `case.defect`: assert the behaviour that `case.note` calls sane (`expected` may then stay unread). Tools: `golden_case`.
"""

import importlib
from collections.abc import Callable
from pathlib import Path

from golden_case import Case

HERE = Path(__file__).parent


def test_golden(golden: Case) -> None:
    _check_for(golden)(golden)
    unread = golden.unread()
    assert not unread, f"the check of {golden.file}/{golden.kind} ignores {', '.join(unread)}: honour or name them"


def test_case_names_are_unique_within_a_file() -> None:
    from golden_case import load_cases  # noqa: PLC0415 - beside its only use

    names = [(case.file, case.name) for case in load_cases(HERE / "data")]
    assert len(names) == len(set(names))


def _check_for(case: Case) -> Callable[[Case], None]:
    modules = sorted(path.stem for path in (*HERE.glob(f"check_{case.file}.py"), *HERE.glob(f"check_{case.file}_*.py")))
    assert modules, f"no check_{case.file}.py for {case.file}.json: write one"
    broken: dict[str, Exception] = {}
    found: dict[str, Callable[[Case], None]] = {}
    others: dict[str, Callable[[Case], None]] = {}
    reference = f"{case.kind.partition('_')[0]}_*"
    for name in modules:
        try:
            checks: dict[str, Callable[[Case], None]] = importlib.import_module(name).CHECKS
        except Exception as error:  # noqa: BLE001 - raised again below unless another module has the kind
            broken[name] = error
            continue
        if case.kind in checks:
            found[name] = checks[case.kind]
        elif reference in checks:
            others[name] = checks[reference]
    found = found or others
    if not found and broken:
        raise next(iter(broken.values()))
    assert found, f"no check for kind {case.kind!r} of {case.file}.json in {', '.join(modules)}"
    assert len(found) == 1, f"kind {case.kind!r} of {case.file}.json is checked by {', '.join(found)}: keep one"
    return next(iter(found.values()))
