"""On the command line a warning of this package is one line, and those of others are as Python prints them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings

import pytest

from lit_asyncrl.__main__ import main

CODE = """
import warnings
from lit_asyncrl.__main__ import one_line
warnings.formatwarning = one_line(warnings.formatwarning)
rank_zero = {"__name__": "lightning.fabric.utilities.rank_zero", "warnings": warnings}
exec("def rank_zero_warn(message): warnings.warn(message, stacklevel=2)", rank_zero)
exec(STATEMENT, {"__name__": MODULE, "warnings": warnings, "rank_zero_warn": rank_zero["rank_zero_warn"]})
"""


def shown(module: str, statement: str, screen: int = subprocess.PIPE) -> str:
    """What code of a module prints to standard error."""
    code = f"MODULE, STATEMENT = {module!r}, {statement!r}\n{CODE}"
    return subprocess.run([sys.executable, "-c", code], stderr=screen, text=True, check=True, timeout=60).stderr


@pytest.mark.parametrize("statement", ["warnings.warn('all is lost', stacklevel=2)", "rank_zero_warn('all is lost')"])
def test_a_warning_of_this_package_is_one_line(statement):
    assert shown("lit_asyncrl.pool.pool", statement) == "lit-asyncrl: warning: all is lost\n"


def test_on_a_terminal_it_takes_the_place_of_a_progress_bar():
    terminal, screen = os.openpty()
    shown("lit_asyncrl.loaders", "warnings.warn('late', stacklevel=2)", screen)
    os.close(screen)
    text = os.read(terminal, 4096)
    os.close(terminal)
    assert text == b"\r\x1b[Klit-asyncrl: warning: late\r\n"  # to the line's begin, and clear it


def test_the_launcher_sets_it_last_since_lightning_sets_its_own_when_it_is_imported(monkeypatch):
    formats: list[object] = []
    monkeypatch.setattr("lit_asyncrl.cli.main", lambda: formats.append(warnings.formatwarning))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr("lit_asyncrl.__main__.end", formats.append)  # the process is the test's
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # put back after the test
    main()
    assert formats[0].__qualname__.startswith("one_line.")
    assert formats[1] == 0


@pytest.mark.parametrize("statement", ["warnings.warn('of theirs')", "rank_zero_warn('of theirs')"])
def test_a_warning_of_another_package_says_where_it_comes_from(statement):
    text = shown("torch.nn", statement)
    assert "UserWarning: of theirs" in text and not text.startswith("lit-asyncrl")
