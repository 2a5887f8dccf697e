"""The command line: flags, the configuration file, and one sentence for what is wrong."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

from novainfer import (
    ContextLengthExceeded,
    EngineConfig,
    InvalidParameter,
    ModelLoadError,
    NovaInferError,
    SamplingParams,
)
from novainfer.fsm.parsing.formats import Formats
from novainfer.fsm.schedule.speculative_config import SpeculativeConfig
from novainfer.server.cli import chat as cli_chat
from novainfer.server.cli import generate as cli_generate
from novainfer.server.cli import serve as cli_serve
from novainfer.server.cli.flags import Flag
from novainfer.server.cli.main import COMMANDS, as_flags, main
from novainfer.server.operate.recorder import default_folder
from novainfer.server.settings import LogSettings, ServerSettings
from novainfer.setting import VARIABLE_PREFIX, Setting, settings_of
from tests.server.fakes import FakeEngine, FakeModelInfo


class Served(Exception):
    """Raised in place of serving, with what would have been served."""


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`served(*argv)`: the two configurations that `novainfer serve *argv` arrives at."""
    for name in list(os.environ):
        if name.startswith(VARIABLE_PREFIX):
            monkeypatch.delenv(name)
    found: list[tuple[EngineConfig, ServerSettings]] = []
    configs: list[EngineConfig] = []

    def make_engine(config: EngineConfig) -> FakeEngine:
        configs.append(config)
        return FakeEngine()

    def run_server(settings: ServerSettings, make: Any) -> int:
        make()
        found.append((configs[-1], settings))
        return 0

    monkeypatch.setattr(cli_serve, "make_engine", make_engine)
    monkeypatch.setattr("novainfer.server.serve.run_server", run_server)

    def call(*argv: str) -> tuple[EngineConfig, ServerSettings]:
        assert main(["serve", *argv]) == 0
        return found[-1]

    return call


def test_without_flags_it_is_the_defaults(served: Any) -> None:
    folder = default_folder()
    settings = ServerSettings(client_room=256 + 1024 // 8, client_tokens=1 << 20)
    assert served() == (EngineConfig(worker="process", recorder_dir=folder), settings)
    assert served("--worker", "thread") == (EngineConfig(recorder_dir=folder), settings)


def test_several_models_have_a_name_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found: list[Any] = []
    monkeypatch.setattr("novainfer.server.serve.run_server", lambda settings, hosted: (found.append(hosted), 0)[1])
    argv = ("--model", "a=org/one", "--model", "b=/two words/x=y", "--max-loaded-models", "1")
    assert main(["serve", *argv]) == 0
    assert (found[-1].names, found[-1].max_loaded) == (("a", "b"), 1)
    monkeypatch.setenv("NOVAINFER_MODEL", "a=org/one c=org/three")
    assert main(["serve"]) == 0
    assert found[-1].names == ("a", "c")
    monkeypatch.delenv("NOVAINFER_MODEL")
    (file := tmp_path / "nova.yaml").write_text("model: [d=org/one, e=org/two]\n")
    assert main(["serve", "--config", str(file)]) == 0
    assert found[-1].names == ("d", "e")
    assert main(["serve", "--model", "org/one", "--model-idle-unload", "60"]) == 0
    assert found[-1].names == ("org/one",)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--model", "a=x", "--model", "y"), "each is NAME=PATH, and not 'y'"),
        (("--model", "a=x", "--model", "a=y"), "two models are called 'a'"),
        (("--model", "a=x", "--model", "b=y", "demo"), "leave MODEL out"),
        (("--model", "a=x", "--model", "b=y", "--served-model-name", "z"), "leave --served-model-name out"),
        (("--max-loaded-models", "0"), "--max-loaded-models must be at least 1, not 0"),
        (("--model-idle-unload", "0"), "--model-idle-unload must be more than 0 seconds"),
    ],
)
def test_what_is_wrong_with_several_models_is_one_sentence(
    argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *argv]) == 2
    assert message in capsys.readouterr().err


def test_one_model_may_have_its_name_with_it_and_is_served_as_ever(
    served: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config, _ = served("--model", "mine=org/one")
    assert (config.model, config.served_model_name, config.memory_share) == ("org/one", "mine", 1.0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b").mkdir()
    assert served("--model", "a=b")[0].model == "a=b"
    monkeypatch.setenv("NOVAINFER_MODEL", "/my models/one")
    assert served()[0].model == "/my models/one"


def test_where_the_usual_folder_cannot_be_written_recordings_stay_in_memory(
    served: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert served()[0].recorder_dir is None
    assert "--recorder-dir" in caplog.text


def test_every_flag_arrives(served: Any, tmp_path: Path) -> None:
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).touch()
    config, settings = served(
        *("org/model", "--tokenizer", "org/other", "--served-model-name", "nova", "--device", "nvidia"),
        *("--dtype", "half", "--seed", "3", "--max-model-len", "99", "--max-num-seqs", "4"),
        *("--max-num-batched-tokens", "64", "--prefill-chunk-tokens", "32", "--block-size", "8"),
        *("--no-enable-prefix-caching", "--kv-cache-capacity-mode", "fixed", "--num-kv-blocks", "77"),
        *("--gpu-memory-utilization", "0.3", "--max-num-queued-reqs", "5", "--max-num-queued-tokens", "600"),
        *("--num-threads", "2", "--native", "0", "--batch-invariant", "--verbose"),
        *("--host", "0.0.0.0", "--port", "0", "--api-key", "a", "--api-key", "b", "--access-log"),
        *("--ssl-certfile", str(tmp_path / "cert.pem"), "--ssl-keyfile", str(tmp_path / "key.pem")),
        *("--sse-keep-alive-interval", "7", "--shutdown-timeout", "9", "--max-body-bytes", "1234"),
        *("--http2-max-concurrent-streams", "12", "--log-level", "warning"),
        *("--max-client-reqs", "7", "--max-client-unread", "5"),
        *("--warm-spare", "--step-timeout", "8", "--heartbeat-timeout", "2.5"),
        *("--max-restarts", "7", "--restart-window", "30", "--ladder-quiet-s", "6", "--swap-space-gib", "0.5"),
        *("--stall-keep-s", "3", "--stall-timeout", "40", "--max-num-overflow-reqs", "11", "--no-recorder"),
        *("--recorder-dir", str(tmp_path / "recordings"), "--quantization", "int8"),
        *("--kv-cache-dtype", "fp8", "--attention-backend", "sdpa"),
    )
    assert config == EngineConfig(
        model="org/model",
        tokenizer="org/other",
        served_model_name="nova",
        device="cuda",
        dtype="float16",
        quantization="int8",
        kv_cache_dtype="fp8",
        attention_backend="sdpa",
        seed=3,
        max_model_len=99,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        prefill_chunk_tokens=32,
        block_size=8,
        enable_prefix_caching=False,
        kv_cache_capacity_mode="fixed",
        gpu_memory_utilization=0.3,
        num_kv_blocks=77,
        max_num_queued_reqs=5,
        max_num_queued_tokens=600,
        num_threads=2,
        native="0",
        batch_invariant=True,
        worker="process",
        warm_spare=True,
        step_timeout_s=8.0,
        heartbeat_timeout_s=2.5,
        max_restarts=7,
        restart_window_s=30.0,
        ladder_quiet_s=6.0,
        swap_space_gib=0.5,
        stall_keep_s=3.0,
        stall_timeout_s=40.0,
        max_num_overflow_reqs=11,
        recorder=False,
        recorder_dir=str(tmp_path / "recordings"),
    )
    assert settings == ServerSettings(
        host="0.0.0.0",
        port=0,
        api_keys=("a", "b"),
        ssl_certfile=tmp_path / "cert.pem",
        ssl_keyfile=tmp_path / "key.pem",
        access_log=True,
        sse_keep_alive_interval_s=7,
        stall_timeout_s=40.0,
        shutdown_timeout_s=9,
        body_bytes=1234,
        http2_max_concurrent_streams=12,
        max_client_reqs=7,
        max_client_tokens=300,
        max_client_unread=5,
        client_tokens=600,
    )


@pytest.mark.parametrize("flag", ["--model", "--model-path", "--hf-checkpoint", "--checkpoint-path"])
def test_a_model_has_many_names(served: Any, tmp_path: Path, flag: str) -> None:
    assert served(flag, str(tmp_path))[0].model == str(tmp_path)
    assert served(flag, str(tmp_path), str(tmp_path))[0].model == str(tmp_path)  # the same twice is no conflict


def test_a_file_gives_defaults_and_flags_win(served: Any, tmp_path: Path) -> None:
    file = tmp_path / "nova.yaml"
    file.write_text(
        "model: org/from-file\nmax-num-seqs: 3\nblock_size: 4\napi-key: [x, y]\nno-enable-prefix-caching: true\n"
        "gpu-memory-utilization: 0.25\naccess-log: true\nport: 1\n"
    )
    config, settings = served("--config", str(file), "--block-size", "32")
    assert (config.model, config.max_num_seqs, config.block_size) == ("org/from-file", 3, 32)
    assert (config.enable_prefix_caching, config.gpu_memory_utilization) == (False, 0.25)
    assert (settings.api_keys, settings.access_log, settings.port) == (("x", "y"), True, 1)
    assert served("org/typed", "--config", str(file))[0].model == "org/typed"
    assert served("--kv-cache-memory-utilization", "0.3")[0].kv_cache_memory_utilization == 0.3


def test_with_keys_one_client_may_have_half_of_what_may_run_and_wait(served: Any) -> None:
    size = ("--max-num-seqs", "10", "--max-num-queued-reqs", "30")
    settings = served(*size, "--api-key", "a")[1]
    assert (settings.max_client_reqs, settings.client_room) == (20, 13)
    assert (settings.max_client_tokens, settings.client_tokens) == (1 << 19, 1 << 20)
    settings = served(*size, "--api-key", "a", "--max-client-reqs", "3")[1]
    assert (settings.max_client_reqs, settings.client_room) == (3, None)


def test_without_keys_an_address_has_everything_while_it_is_alone_and_room_in_the_queue_is_left_to_others(
    served: Any,
) -> None:
    size = ("--max-num-seqs", "10", "--max-num-queued-reqs", "32")
    settings = served(*size)[1]
    assert (settings.max_client_reqs, settings.client_room) == (None, 14)
    assert (settings.max_client_tokens, settings.client_tokens) == (None, 1 << 20)
    settings = served(*size, "--max-client-reqs", "3")[1]
    assert (settings.max_client_reqs, settings.client_room) == (3, None)


def test_keys_come_from_the_environment(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOVA_API_KEY", "old")
    assert served()[1].api_keys == ("old",)
    monkeypatch.setenv("NOVAINFER_API_KEY", "secret")
    assert served()[1].api_keys == ("secret",)
    monkeypatch.setenv("NOVAINFER_ADMIN_KEY", "boss")
    assert served()[1].admin_key == "boss"
    assert served("--admin-key", "other")[1].admin_key == "other"


WRONG: list[tuple[list[str], str]] = [
    (["--port", "x"], "--port"),
    (["--port", "70000"], "--port"),
    (["--max-num-seqs", "0"], "--max-num-seqs must be at least 1, not 0"),
    (["--max-num-seqs", "many"], "--max-num-seqs"),
    (["--num-threads", "100000"], "--num-threads must be at most 1024, not 100000"),
    (["--max-num-seqs", "512", "--max-num-batched-tokens", "100"], "--max-num-batched-tokens"),
    (["--kv-cache-memory-utilization", "1.5"], "--kv-cache-memory-utilization"),
    (["--kv-cache-memory-utilization", "0.5", "--device", "cuda"], "on cuda --gpu-memory-utilization"),
    (["--gpu-memory-utilization", "0"], "--gpu-memory-utilization"),
    (["--kv-cache-capacity-mode", "fixed"], "--num-kv-blocks"),
    (["--kv-cache-capacity-mode", "huge"], "--kv-cache-capacity-mode"),
    (["--dtype", "int3"], "--dtype"),
    (["--quantization", "int3"], "'--quantization': 'int3' is not one of 'int8', 'int4', 'fp8', 'none'"),
    (["--kv-cache-dtype", "int4"], "'--kv-cache-dtype': 'int4' is not one of 'auto', 'int8', 'fp8'"),
    (["--attention-backend", "flash"], "--attention-backend"),
    (["--device", "tpu"], "--device"),
    (["--shutdown-timeout", "-1"], "--shutdown-timeout"),
    (["--max-body-bytes", "0"], "--max-body-bytes"),
    (["--ssl-certfile", "/no/such/file"], "--ssl-certfile"),
    (["--ssl-certfile", "pyproject.toml"], "--ssl-certfile"),
    (["--hf-checkpoint", "a", "--checkpoint-path", "."], "--hf-checkpoint and --checkpoint-path"),
    (["a", "--model", "b"], "MODEL and --model"),
    (["--checkpoint-path", "/no/such/folder"], "--checkpoint-path"),
    (["--no-such-flag"], "--no-such-flag"),
    (["--config", "/no/such/file"], "--config"),
    (["--api-key", ""], "--api-key must be ASCII and not empty"),
    (
        ["--http2-initial-connection-window-size", "65534"],
        "--http2-initial-connection-window-size must be between 65535 and 2147483647 bytes, not 65534",
    ),
    (["--root-path", "llm"], "--root-path must be a path that begins with / and does not end with it"),
    (["--backlog", "0"], "--backlog must be at least 1, not 0"),
    (["--backlog", "70000"], "--backlog must be at most 65535, not 70000"),
    (["--keep-alive-timeout", "0"], "--keep-alive-timeout must be more than 0 seconds"),
    (["--admin-key", ""], "--admin-key"),
    (["--worker", "cluster"], "--worker"),
    (["--worker", "thread", "--warm-spare"], "--warm-spare needs"),
    (["--step-timeout", "0"], "--step-timeout must be at least 1 s, not 0.0: steps of a healthy worker would"),
    (["--step-timeout", "1e-9"], "--step-timeout must be at least 1 s, not 1e-09"),
    (["--heartbeat-timeout", "0.2"], "--heartbeat-timeout must be at least 1 s, not 0.2: a process that waits"),
    (["--sse-keep-alive-interval", "1e-9"], "--sse-keep-alive-interval must be 0, which is none, or at least 0.01"),
    (["--max-restarts", "-1"], "--max-restarts must be at least 0, not -1"),
    (["--step-timeout", "1e300"], "--step-timeout must be at most 31622400 seconds, not 1e+300"),
    (["--stall-timeout", "1e300"], "--stall-timeout must be at most 31622400 seconds"),
    (["--stall-keep-s", "1e300"], "--stall-keep-s must be at most 31622400 seconds"),
    (["--stall-timeout", "inf"], "--stall-timeout must be a finite number, not inf"),
    (["--step-timeout", "nan"], "--step-timeout must be a finite number, not nan"),
    (["--stall-keep-s", "inf"], "--stall-keep-s must be a finite number, not inf"),
    (["--swap-space-gib", "inf"], "--swap-space-gib must be a finite number, not inf"),
    (["--shutdown-timeout", "nan"], "--shutdown-timeout must be a number of seconds, not nan"),
    (["--shutdown-timeout", "inf"], "--shutdown-timeout must be at most 31622400 seconds, not inf"),
    (["--http2-max-concurrent-streams", "4294967296"], "--http2-max-concurrent-streams must be at most 2147483647"),
    (["--stall-keep-s", "-1"], "--stall-keep-s must be at least 0, not -1.0"),
]


@pytest.mark.parametrize(("argv", "said"), WRONG, ids=[" ".join(argv) for argv, _ in WRONG])
def test_what_is_wrong_is_one_sentence_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    assert main(["serve", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    assert said in err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max-num-sqes: 3", "'max-num-sqes'"),
        ("- a\n- b", "flag: value"),
        ("a: [", "cannot be read"),
        ("max-num-seqs: many", "--max-num-seqs"),
        ("port: {a: 1}", "one value"),
        ("no-access-log: 3", "true or false"),
    ],
)
def test_what_is_wrong_in_the_file_is_one_sentence_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "nova.yaml"
    file.write_text(text)
    assert main(["serve", "--config", str(file)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert said in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["{}/empty"], "{}/empty holds no config.json, so it is not a Hugging Face model folder"),
        (["/nope"], "model /nope is neither a folder here nor a hub id of the form organisation/name"),
        (["--tokenizer", "/nope"], "--tokenizer /nope is neither a folder here nor a hub id"),
        (["--tokenizer", "{}/empty"], "--tokenizer: there is no tokenizer in {}/empty"),
        (["--recorder-dir", "{}/file/x"], "--recorder-dir {}/file/x cannot be written: Not a directory"),
    ],
)
def test_what_keeps_a_server_from_starting_is_the_only_sentence(tmp_path: Path, argv: list[str], said: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    argv = [arg.format(tmp_path) for arg in argv]
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    command = [sys.executable, "-m", "novainfer.server", *argv, "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    loading, error = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert loading.startswith("Loading the model; ")
    assert error.startswith("Error: " + said.format(tmp_path))
    assert not list(tmp_path.rglob("*.novarec"))


def test_a_model_that_cannot_be_loaded_is_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine()
    engine.start_failure = ModelLoadError("/models/x has no config.json")
    for module in (cli_serve, cli_chat, cli_generate):
        monkeypatch.setattr(module, "make_engine", lambda config: engine)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "x"}\n')))
    for argv in (["serve", "--port", "0"], ["chat"], ["generate"]):
        assert main(argv) == 2
        assert capsys.readouterr().err.endswith("Error: /models/x has no config.json\n")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            InvalidParameter("max_num_seqs must be at least 1", param="max_num_seqs"),
            "--max-num-seqs must be at least 1",
        ),
        (ModelLoadError("max_model_len (9) is more than 8"), "--max-model-len (9) is more than 8"),
        (InvalidParameter("must not be empty", param="host"), "--host: must not be empty"),
        (
            InvalidParameter("speculative_config: it must be a JSON object", param="speculative_config"),
            "--speculative-config: it must be a JSON object",
        ),
        (
            InvalidParameter("max_num_seqs must be at most max_num_batched_tokens (8)", param="max_num_seqs"),
            "--max-num-seqs must be at most --max-num-batched-tokens (8)",
        ),
        (
            InvalidParameter("recorder_dir /x/max_num_seqs cannot be written", param="recorder_dir"),
            "--recorder-dir /x/max_num_seqs cannot be written",
        ),
        (ModelLoadError("/models/a_b has no config.json"), "/models/a_b has no config.json"),
        (
            ModelLoadError("cannot load a tokenizer from /x: no such file", param="tokenizer"),
            "--tokenizer: cannot load a tokenizer from /x: no such file",
        ),
        (ModelLoadError("tokenizer /nope is no folder", param="tokenizer"), "--tokenizer /nope is no folder"),
        (ModelLoadError("model /nope is no folder", param="model"), "model /nope is no folder"),
    ],
)
def test_fields_are_named_as_flags(error: NovaInferError, said: str) -> None:
    assert as_flags(error) == said


def test_help_names_every_command_without_loading_it() -> None:
    code = "import sys; from novainfer.server.cli.main import main; main(['--help']); print(sorted(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    text, modules = out.rsplit("\n[", 1)
    assert all(name in text for name in COMMANDS)
    for module in ("torch", "transformers", "hypercorn", "starlette", "novainfer.engine"):
        assert f"'{module}'" not in modules


@pytest.mark.parametrize("name", ["serve", "chat", "generate"])
def test_each_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert "--max-num-seqs" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["serve", "chat", "generate"])
def test_each_flag_has_a_group_and_one_sentence_and_says_its_default(name: str) -> None:
    command = {"serve": cli_serve.serve, "chat": cli_chat.chat, "generate": cli_generate.generate}[name]
    defaults = dict(zip(EngineConfig.__struct_fields__, EngineConfig.__struct_defaults__, strict=True))
    for flag in (param for param in command.params if isinstance(param, click.Option)):
        assert isinstance(flag, Flag), flag.name
        assert flag.help, flag.name
        sentence = flag.help.split(" [")[0]
        assert sentence.endswith("."), flag.name
        assert ". " not in sentence, flag.name
        default = defaults.get(str(flag.name), defaults.get(f"{flag.name}_s"))
        if default is not None and not isinstance(default, bool) and flag.name not in ("worker", "dtype", "device"):
            assert f"[default: {default}]" in flag.help, flag.name


def test_the_schema_of_a_file_of_flags_has_every_setting_and_nothing_that_is_no_flag() -> None:
    schema = json.loads((Path(__file__).parents[2] / "docs" / "config.schema.json").read_text(encoding="utf-8"))
    flags = {opt.removeprefix("--") for param in cli_serve.serve.params for opt in param.opts}
    assert set(schema["properties"]) <= flags
    own = {setting.flag.removeprefix("--") for setting in SETTINGS}
    assert set(schema["properties"]) == own
    assert all(setting.flag for setting in settings_of(EngineConfig))
    assert schema["properties"]["step-timeout"] == {
        "description": "Seconds after which a step counts as hung, and its worker as lost.",
        "type": "number",
        "default": 60.0,
    }


SETTINGS: list[Setting] = [
    setting for record in (EngineConfig, ServerSettings, LogSettings) for setting in settings_of(record) if setting.flag
]


def test_what_the_schema_refers_to_is_in_it() -> None:
    text = (Path(__file__).parents[2] / "docs" / "config.schema.json").read_text(encoding="utf-8")
    found = re.findall(r'"\$ref": "#/([^"]*)"', text)
    assert found
    for reference in found:
        place = json.loads(text)
        for name in reference.split("/"):
            place = place[name]


def test_a_file_holds_an_object_as_its_schema_says(served: Any, tmp_path: Path) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text("speculative-config:\n  method: ngram\n  num_speculative_tokens: 3\n")
    config, _ = served("--config", str(file))
    assert config.speculative_config == SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    config, _ = served("--config", str(file), "--speculative-config", '{"num_speculative_tokens": 2}')
    assert config.speculative_config == SpeculativeConfig(num_speculative_tokens=2)


def test_help_has_a_section_for_each_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    out = capsys.readouterr().out
    for title in ("Model:", "KV memory:", "Queue:", "Worker and recovery:", "Address and TLS:", "Access:"):
        assert f"\n{title}\n" in out


def test_every_option_has_a_hyphenated_name_and_no_double() -> None:
    for command in (cli_serve.serve, cli_chat.chat, cli_generate.generate):
        names = [opt for param in command.params for opt in param.opts if isinstance(param, click.Option)]
        assert len(names) == len(set(names))
        assert not any("_" in name for name in names)


class Terminal(io.StringIO):
    """What is typed."""

    def isatty(self) -> bool:
        return True


def chat_with(
    monkeypatch: pytest.MonkeyPatch, engine: FakeEngine, text: str | bytes, *argv: str, exit_code: int = 0
) -> None:
    monkeypatch.setattr(cli_chat, "make_engine", lambda config: engine)
    piped = io.StringIO(text) if isinstance(text, str) else io.TextIOWrapper(io.BytesIO(text), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", piped)
    assert main(["chat", *argv]) == exit_code


def test_chat_remembers_until_told_to_forget(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine()
    chat_with(monkeypatch, engine, "one\ntwo\n/reset\nthree\n/help\n/exit\nfour\n", "--system", "be kind")
    assert capsys.readouterr().out == "Hello, world!\n" * 3
    seen = [[message["content"] for message in prompt.messages] for prompt, _, _ in engine.seen]
    answer = "Hello, world!"
    assert seen == [["be kind", "one"], ["be kind", "one", answer, "two"], ["be kind", "three"]]
    assert engine.is_closed


@pytest.mark.parametrize("flags", [[], ["--no-thoughts"]])
def test_what_a_model_thinks_is_no_part_of_the_chat(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine(answer=("<think>", "hm", "m</think>", "\n\nHel", "lo"))
    engine.model_info = FakeModelInfo(formats=Formats(reasoning="think"))
    chat_with(monkeypatch, engine, "one\ntwo\n", *flags)
    found = capsys.readouterr()
    assert found.out == "Hello\n" * 2
    assert found.err == ("" if flags else "hmm\n\n" * 2)
    assert engine.seen[1][0].messages[1] == {"role": "assistant", "content": "Hello"}


def test_chat_samples_as_the_model_wants_where_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    chat_with(monkeypatch, engine, "one\n")
    assert engine.seen[0][1] == SamplingParams(temperature=0.7, max_tokens=None)
    engine = FakeEngine()
    engine.model_info = msgspec.structs.replace(engine.model_info, sampling_defaults={"top_k": 20, "temperature": 0.6})
    chat_with(monkeypatch, engine, "one\n", "--temperature", "0", "--max-tokens", "9")
    assert engine.seen[0][1] == SamplingParams(temperature=0, top_k=20, max_tokens=9)
    assert main(["chat", "--top-p", "2"]) == 2


def test_chat_says_what_to_do_when_the_context_is_full(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine()
    engine.fail_at, engine.failure = 0, ContextLengthExceeded("This model's maximum context length is 64 tokens")
    chat_with(monkeypatch, engine, "one\n", exit_code=1)
    full = "/reset forgets the conversation and makes room."
    assert capsys.readouterr().err == f"Error: This model's maximum context length is 64 tokens. {full}\n"
    engine = FakeEngine()
    chat_with(monkeypatch, engine, "one\n", "--max-tokens", "2")
    assert "(the answer has reached --max-tokens)" in capsys.readouterr().err


def test_chat_goes_on_after_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    engine.overloaded = True
    chat_with(monkeypatch, engine, "one\ntwo\n", exit_code=1)
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "Error: The queue is full\n" * 2


def test_chat_names_the_line_of_its_input_that_is_no_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine()
    chat_with(monkeypatch, engine, b"one\n\nt\xffwo\nthr\xc3\xa9e\n", exit_code=1)
    out, err = capsys.readouterr()
    assert out == "Hello, world!\n" * 2
    assert err == "Error: line 3 of the input is not valid UTF-8, and was left out\n"
    assert engine.seen[1][0].messages[-1] == {"role": "user", "content": "thr\u00e9e"}
    assert main(["chat", "--system", "\udcff"]) == 2
    assert capsys.readouterr().err == "Error: --system must be valid UTF-8\n"


def test_a_question_at_a_terminal_that_fails_is_no_failure_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    engine.overloaded = True
    monkeypatch.setattr(cli_chat, "make_engine", lambda config: engine)
    monkeypatch.setattr(sys, "stdin", Terminal("one\n"))
    assert main(["chat"]) == 0


def test_ctrl_c_stops_the_answer_and_not_the_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine()
    echo = click.echo
    said = 0

    def interrupt(*args: Any, **kwargs: Any) -> None:
        nonlocal said
        echo(*args, **kwargs)
        said += 1
        if said == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("novainfer.server.cli.chat.click.echo", interrupt)
    chat_with(monkeypatch, engine, "one\ntwo\n")
    assert capsys.readouterr().out == "Hello,\nHello, world!\n"
    assert len(engine.left_early) == 1
    assert engine.seen[1][0].messages[1] == {"role": "assistant", "content": "Hello,"}
