from __future__ import annotations

from pathlib import Path

import platformdirs
import pytest
from platformdirs.macos import MacOS
from platformdirs.unix import Unix

from placer.errors import InputError
from placer_server.settings import Settings, misspelt


def test_settings_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("PLACER_PORT", "1234")
    monkeypatch.setenv("PLACER_URL", "http://for-the-client")
    assert Settings().port == 1234


def test_what_is_given_counts_more_than_the_environment(monkeypatch):
    monkeypatch.setenv("PLACER_PORT", "1234")
    assert Settings(port=5678).port == 5678


@pytest.mark.parametrize(
    ("name", "value"),
    [("PORT", "99999"), ("PORT", "http"), ("WORKERS", "0"), ("LOG_LEVEL", "loud"), ("KEEP", "")],
)
def test_a_setting_that_cannot_be_used_is_an_input_error_that_names_it(monkeypatch, name, value):
    monkeypatch.setenv(f"PLACER_{name}", value)
    with pytest.raises(InputError, match=f"PLACER_{name} is '{value}'"):
        Settings()


def test_the_database_is_in_the_users_state_directory_by_default(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert Settings().database == str(tmp_path / "placer" / "placements.db")


def test_the_default_database_is_where_the_system_keeps_the_state_of_applications(monkeypatch):
    # The folder was the one of Linux on every system.
    monkeypatch.delenv("PLACER_DATABASE", raising=False)
    monkeypatch.setattr(platformdirs, "PlatformDirs", MacOS)
    folder = Path("~/Library/Application Support/placer").expanduser()
    assert Settings().database == str(folder / "placements.db")


def test_an_empty_state_directory_in_the_environment_means_the_default(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(platformdirs, "PlatformDirs", Unix)
    assert Settings().database == str(tmp_path / ".local" / "state" / "placer" / "placements.db")


def test_a_graph_may_take_half_of_what_the_container_has(tmp_path, monkeypatch):
    from placer_server import settings

    limit = tmp_path / "memory.max"
    monkeypatch.setattr(settings, "CGROUP_LIMIT", limit)
    limit.write_text("2097152\n")
    assert Settings().profile_memory_bytes == 2**20
    limit.write_text("max\n")
    assert Settings().profile_memory_bytes > 2**20


def test_a_graph_may_take_half_of_what_a_container_of_cgroup_version_1_has(tmp_path, monkeypatch):
    # It was half of the machine's memory, for which the system killed the whole container.
    from placer.utils import host_memory

    monkeypatch.setattr(host_memory, "MOUNT", tmp_path)
    monkeypatch.setattr(host_memory, "OWN_CGROUPS", tmp_path / "own")
    (tmp_path / "own").write_text("4:memory:/docker/abc\n")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("2097152\n")
    assert Settings().profile_memory_bytes == 2**20


def test_by_default_a_solve_may_take_an_hour_and_the_cores_of_a_request_are_bounded(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert (Settings().max_time_limit_s, Settings().max_solver_workers) == (3600, 8)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    assert Settings().max_solver_workers == 64


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("PORT", "99999", "PLACER_PORT is '99999'; it should be less than or equal to 65535"),
        ("WORKERS", "two", "PLACER_WORKERS is 'two'; it should be a valid integer"),
        (
            "REGISTER_URL",
            "host",
            "PLACER_REGISTER_URL is 'host'; it should be the URL of a service",
        ),
        ("NODE_NAME", "a b", "PLACER_NODE_NAME is 'a b'; it should be 1 to 64 letters, digits"),
    ],
)
def test_a_setting_that_cannot_be_used_is_told_what_it_should_be(monkeypatch, name, value, told):
    # It was "Input should be ...", "unable to parse string as an integer", and a pattern.
    monkeypatch.setenv(f"PLACER_{name}", value)
    with pytest.raises(InputError) as caught:
        Settings()
    assert str(caught.value).startswith(told)


def test_a_misspelt_variable_is_told_with_the_nearest_setting():
    # It was passed over without a word, and the service ran with the default.
    given = {"PLACER_WORKRES": "8", "PLACER_MAX_BODY_BYTE": "1", "PLACER_QUEUE": "3", "HOME": "/"}
    assert misspelt(given | {"PLACER_PROT": "80"}) == [
        "PLACER_MAX_BODY_BYTE is not a setting; did you mean PLACER_MAX_BODY_BYTES?",
        "PLACER_PROT is not a setting; did you mean PLACER_PORT?",
        "PLACER_WORKRES is not a setting; did you mean PLACER_WORKERS?",
    ]


@pytest.mark.parametrize(
    "name",
    ["PLACER_KEY", "PLACER_CACHE", "PLACER_DISK", "PLACER_SERVICE_HOST", "PLACER_PORT_80_TCP"],
)
def test_variables_of_others_are_not_taken_for_misspelt_settings(name):
    # Kubernetes sets some for a service of that name.
    assert misspelt({name: "x"}) == []
