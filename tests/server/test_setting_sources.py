"""A setting has one name in three places, and what is wrong with it is told with the place that it came from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from novainfer import EngineConfig
from novainfer.server.cli import serve as cli_serve
from novainfer.server.cli.main import main
from novainfer.server.cli.options import unknown_variables
from novainfer.server.settings import LogSettings, ServerSettings
from novainfer.setting import VARIABLE_PREFIX, settings_of

Serve = Any  # a call with flags, which returns the two records


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """`serve(*argv)`: the two records that `novainfer serve *argv` arrives at."""
    for name in list(os.environ):
        if name.startswith(VARIABLE_PREFIX):
            monkeypatch.delenv(name)
    found: list[Any] = []
    monkeypatch.setattr(cli_serve, "make_engine", lambda config: found.append(config))

    def run_server(settings: ServerSettings, make: Any) -> int:
        make()
        found.append(settings)
        return 0

    monkeypatch.setattr("novainfer.server.serve.run_server", run_server)

    def call(*argv: str) -> tuple[EngineConfig, ServerSettings]:
        found.clear()
        assert main(["serve", *argv]) == 0
        config, settings = found
        return config, settings

    return call


def test_a_flag_goes_before_a_variable_and_a_variable_before_the_file(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "nova.yaml"
    file.write_text("max-num-seqs: 3\nblock-size: 4\nport: 5\naccess-log: true\nmodel: org/file\nseed: 6\n")
    monkeypatch.setenv("NOVAINFER_CONFIG", str(file))
    config, settings = serve()
    assert (config.max_num_seqs, config.block_size, settings.port, settings.access_log) == (3, 4, 5, True)
    assert config.model == "org/file"
    monkeypatch.setenv("NOVAINFER_BLOCK_SIZE", "8")
    monkeypatch.setenv("NOVAINFER_PORT", "7")
    monkeypatch.setenv("NOVAINFER_ACCESS_LOG", "false")
    monkeypatch.setenv("NOVAINFER_MODEL", "org/variable")
    config, settings = serve()
    assert (config.max_num_seqs, config.block_size, settings.port, settings.access_log) == (3, 8, 7, False)
    assert config.model == "org/variable"
    config, settings = serve("org/typed", "--block-size", "32", "--port", "9", "--access-log")
    assert (config.max_num_seqs, config.block_size, settings.port, settings.access_log) == (3, 32, 9, True)
    assert (config.model, config.seed) == ("org/typed", 6)
    assert serve("--no-access-log")[1].access_log is False


def test_every_setting_has_a_variable_that_arrives(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that are numbers or truth values, each set to what it is not by default."""
    wanted: dict[str, Any] = {}
    for record in (EngineConfig, ServerSettings):
        for setting in settings_of(record):
            kinds = {setting.kind, *getattr(setting.kind, "__args__", ())}
            if not setting.flag or not kinds & {bool, int, float} or setting.name in CANNOT_BE_SET_ALONE:
                continue
            value: Any = not setting.default if bool in kinds else int((setting.default or 7) + 1)
            value = 0.5 if setting.name.endswith(("_utilization", "_share")) else value
            wanted[setting.name] = value
            monkeypatch.setenv(setting.variable, str(value).lower())
    config, settings = serve()
    for name, value in wanted.items():
        found = getattr(config, name, None) if name in EngineConfig.__struct_fields__ else getattr(settings, name)
        assert found == value, name
    assert len(wanted) > 35


CANNOT_BE_SET_ALONE = (
    "model_idle_unload_s",  # a model that may go is one of several (test_cli.py)
    "num_kv_blocks",  # wants the mode "fixed"
    "resume",  # wants a journal
    "self_signed",
    "worker",
)


def test_lists_are_separated_by_spaces_in_a_variable_and_are_lists_in_a_file(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "nova.yaml"
    file.write_text("api-key: [a, 7]\nallowed-origins: https://one.example\n")
    settings = serve("--config", str(file))[1]
    assert (settings.api_keys, settings.allowed_origins) == (("a", "7"), ("https://one.example",))
    monkeypatch.setenv("NOVAINFER_API_KEY", "b c")
    monkeypatch.setenv("NOVAINFER_ALLOWED_ORIGINS", '["https://two.example"]')
    settings = serve("--config", str(file))[1]
    assert (settings.api_keys, settings.allowed_origins) == (("b", "c"), ("https://two.example",))
    monkeypatch.setenv("NOVAINFER_API_KEY", "")
    assert serve()[1].api_keys == ()


KUBERNETES = "which Kubernetes sets for a Service of that name unless enableServiceLinks is false"


@pytest.mark.parametrize(
    ("variables", "text", "argv", "said"),
    [
        ({"NOVAINFER_PORT": "x"}, "", [], "'--port' (from NOVAINFER_PORT): 'x' is not a valid integer."),
        ({"NOVAINFER_PORT": "tcp://10.0.0.1:80"}, "", [], f"'--port' (from NOVAINFER_PORT, {KUBERNETES})"),
        ({"NOVAINFER_PORT": "-1"}, "", [], "--port must be between 0 and 65535, not -1 (from NOVAINFER_PORT)"),
        ({"NOVAINFER_ACCESS_LOG": "perhaps"}, "", [], "(from NOVAINFER_ACCESS_LOG): 'perhaps' is not a valid boolean"),
        ({"NOVAINFER_NATIVE": "maybe"}, "", [], "(from NOVAINFER_NATIVE): 'maybe' is not one of"),
        ({"NOVA_API_KEY": "\u20ac"}, "", [], "--api-key must be ASCII and not empty (from NOVA_API_KEY)"),
        ({}, "block-size: 0", [], "--block-size must be at least 1, not 0 (from {file})"),
        ({}, "block-size: 3.5", [], "'--block-size' (from {file}): '3.5' is not a valid integer."),
        ({}, "block-size: true", [], "'--block-size' (from {file}): 'true' is not a valid integer."),
        ({}, "block-size: 0", ["--block-size", "-1"], "--block-size must be at least 1, not -1\n"),
        ({"NOVAINFER_BLOCK_SIZE": "-2"}, "block-size: 0", [], "not -2 (from NOVAINFER_BLOCK_SIZE)"),
        ({}, "max-num-seqs: 99", ["--max-num-batched-tokens", "9"], "in one step (--max-num-seqs from {file})"),
        ({}, "block-size: 4\nblock-size: 8", [], "cannot be read: block-size stands there 2 times"),
        ({}, "block-size: 4\nblock_size: 8", [], "{file} sets --block-size twice"),
        ({}, "access-log: true\nno-access-log: true", [], "{file} sets --access-log twice"),
        ({}, "api-key: [a, {b: c}]", [], "{file}: api-key must be one value, or a list of them"),
        ({"NOVAINFER_CONFIG": "/no/such/file"}, "", [], "'--config' (from NOVAINFER_CONFIG): File '/no/such/file'"),
    ],
)
def test_what_is_wrong_is_told_with_where_it_came_from(
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    variables: dict[str, str],
    text: str,
    argv: list[str],
    said: str,
) -> None:
    file = tmp_path / "nova.yaml"
    if text:
        file.write_text(text)
        argv = [*argv, "--config", str(file)]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["serve", *argv]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert said.format(file=file) in err


def test_a_variable_that_is_no_setting_is_told(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NOVAINFER_MAX_NUM_SEQ", "3")
    serve()
    assert "NOVAINFER_MAX_NUM_SEQ in the environment is no setting, and does nothing" in caplog.text


def test_what_is_known_and_what_kubernetes_sets_is_no_mistake() -> None:
    of_services = {
        "NOVAINFER_SERVICE_HOST": "10.0.0.1",
        "NOVAINFER_SERVICE_PORT_HTTP": "80",
        "NOVAINFER_PORT_80_TCP_ADDR": "10.0.0.1",
        "NOVAINFER_DEMO_PORT": "tcp://10.0.0.1:80",
    }
    known = {
        setting.variable: "1"
        for record in (EngineConfig, ServerSettings, LogSettings)
        for setting in settings_of(record)
        if setting.flag
    }
    assert unknown_variables(of_services | known | {"NOVAINFER_ISA": "avx2", "HOME": "/"}) == []
    assert unknown_variables({"NOVAINFER_TYPO": ""}) == ["NOVAINFER_TYPO"]


def test_help_says_how_a_setting_is_named_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "may stand in the file of --config (model: VALUE) or in an environment variable (NOVAINFER_MODEL)" in text
