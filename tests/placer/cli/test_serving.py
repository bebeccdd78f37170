"""``placer serve`` on the command line."""

from __future__ import annotations

import inspect
import re

from placer.cli.serving import serve
from placer_server.settings import Settings

SECRETS = {"register_key"}
"""Never on a command line, which others can see."""


def test_every_setting_is_an_option_but_secrets():
    assert set(inspect.signature(serve).parameters) == set(Settings.model_fields) - SECRETS


def test_the_help_shows_each_setting_with_its_variable(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = run("serve", "--help").out
    for name in Settings.model_fields:
        assert re.search(rf"PLACER_{name.upper()}\b", shown), name
        assert name in SECRETS or f"--{name.replace('_', '-')} " in shown, name


def test_what_is_given_counts_more_than_the_environment(monkeypatch):
    taken = []
    monkeypatch.setattr("placer_server.app.run", taken.append)
    monkeypatch.setenv("PLACER_PORT", "1")
    monkeypatch.setenv("PLACER_QUEUE", "7")
    serve(port=2, client_share=0.5)
    assert (taken[0].port, taken[0].queue, taken[0].client_share) == (2, 7, 0.5)
