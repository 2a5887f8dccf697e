"""Folders that cannot be loaded get one clear sentence; those that can are read in every form they come in."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Shape, save_checkpoint
from driver import Driver, make_runner
from safetensors.torch import load_file, save_file

from novainfer.kernels import memory
from novainfer.kernels.errors import LoadError
from novainfer.kernels.models.registry import read_config
from novainfer.kernels.runtime.runner import ModelRunner
from novainfer.kernels.weights.checkpoint import Checkpoint
from novainfer.kernels.weights.header import check_fit
from novainfer.kernels.weights.hub import resolve_model

SHAPE = Shape("plain", 4, 2, 16, 64, 160, sharded=True, eos_token_id=3)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(SHAPE, tmp_path_factory.mktemp("pristine"))


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "model"))


def load(folder: Path, **options: Any) -> ModelRunner:
    defaults = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "max_model_len": None, "native": "0"}
    return ModelRunner.load(folder, **(defaults | options))


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(LoadError) as caught:
        load(folder, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({name: value for name, value in config.items() if value != "DELETE"}))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Rewrite the shards as one file, changed."""
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(shard)
        shard.unlink()
    (folder / "model.safetensors.index.json").unlink()
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not supported; supported: Qwen2ForCausalLM"),
        ({"architectures": "DELETE"}, "architecture none (model_type 'qwen2') is not supported"),
        ({"hidden_size": "DELETE"}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number of at least 1, not '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number of at least 1, not 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 4096"),
        ({"vocab_size": 10**12}, "vocab_size must be at most 2147483647"),
        ({"architectures": [["x"]]}, "architecture ['x'] is not supported"),
        ({"num_key_value_heads": 3}, "(4) must be a multiple of num_key_value_heads (3)"),
        ({"head_dim": None, "num_attention_heads": 6}, "(64) must be a multiple of num_attention_heads (6)"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported, only 'silu'"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a number above 0"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        (
            {"layer_types": ["full_attention"]},
            "layer_types must name the attention of each",
        ),
        (
            {"layer_types": ["full_attention", "chunked"]},
            "layer_types 'chunked' is not supported, only 'full_attention'",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "but there is no sliding_window"),
        (
            {"max_window_layers": -1, "layer_types": None},
            "max_window_layers must be a whole number of at least 0, not -1",
        ),
        ({"dtype": "int8"}, "dtype 'int8' is not supported"),
        ({"eos_token_id": "end"}, "eos_token_id must be a token id or a list"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_that_cannot_be_served_is_named(folder: Path, values: dict[str, Any], expected: str) -> None:
    edit_config(folder, **values)
    message = refusal(folder)
    assert expected in message
    assert "config.json" in message


def test_missing_and_broken_files_are_named(folder: Path) -> None:
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    whole = shards[1].read_bytes()

    shards[1].write_bytes(whole[: len(whole) - 100])
    assert "was cut off" in refusal(folder)
    shards[1].write_bytes(whole[:5])
    assert "its header is not complete" in refusal(folder)
    shards[1].write_bytes(whole[:8] + b"x" * (len(whole) - 8))
    assert f"{shards[1]} is corrupt: its header is not valid JSON" in refusal(folder)
    shards[1].unlink()
    assert f"lacks 1 of {len(shards)} shards" in refusal(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text("{}")
    assert 'must hold a "weight_map"' in refusal(folder)
    index.write_text('{"weight_map": {"a": "../other.safetensors"}}')
    assert "files of its own folder" in refusal(folder)
    index.unlink()
    assert "holds no model.safetensors" in refusal(folder)
    (folder / "pytorch_model.bin").touch()
    assert "pytorch_model.bin is a pickle file" in refusal(folder)
    (folder / "config.json").write_text("{nonsense")
    assert "config.json is not valid JSON" in refusal(folder)
    (folder / "config.json").unlink()
    assert "holds no config.json" in refusal(folder)


DEEP = "[" * 100_000


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("text", [DEEP, '{"a": ' + "[" * 80 + "]" * 80 + "}"], ids=["without end", "80 deep"])
def test_json_that_is_nested_too_deep_is_named(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    assert f"{folder / name} is not valid JSON: it is nested more than 64 levels deep" in refusal(folder)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["a" * 5000], f"lacks 1 of 1 shards that model.safetensors.index.json names: {'a' * 100}"),
        (["a", "b" * 255, "c" * 256], "lacks 3 of 3 shards that model.safetensors.index.json names: a, bbb"),
        ([""], "must name files of its own folder only"),
        (["."], "must name files of its own folder only"),
        ([5], 'must hold a "weight_map" from tensor names to files'),
        (["a\nb"], 'must hold a "weight_map" from tensor names to files'),
    ],
)
def test_shards_that_no_file_can_be_are_told(folder: Path, files: list[Any], expected: str) -> None:
    index = {"weight_map": {f"tensor.{at}": name for at, name in enumerate(files)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    message = refusal(folder)
    assert expected in message
    assert len(message) < 700


def test_a_tensor_in_two_shards_is_refused_whatever_the_index_says(folder: Path) -> None:
    first, *_, last = sorted(folder.glob("*.safetensors"))
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(last) | {name: torch.zeros_like(tensor)}, last)
    assert f"{last}: tensor {name} is in {first.name}, too" in refusal(folder)


def edit_header(folder: Path, change: Callable[[dict[str, Any]], None], text: str = "") -> None:
    """Rewrite the header of the one file, changed; `text` stands in it where `change` has put "@"."""
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    change(header)
    encoded = json.dumps(header).replace('"@"', text).encode()
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + whole[8 + length :])


@pytest.mark.parametrize(
    ("field", "text", "expected"),
    [
        ("shape", "[1e999]", "the shape of model.norm.weight must be a list of whole numbers"),
        ("shape", "[NaN]", "the shape of model.norm.weight must be a list of whole numbers"),
        ("shape", "[64.9]", "the shape of model.norm.weight must be a list of whole numbers"),
        ("shape", "[64, true]", "the shape of model.norm.weight must be a list of whole numbers"),
        ("shape", '["64"]', "the shape of model.norm.weight must be a list of whole numbers"),
        ("shape", "[-64]", "the shape of model.norm.weight must be a list of whole numbers"),
        ("shape", "null", "the shape of model.norm.weight must be a list of whole numbers"),
        ("data_offsets", "[Infinity, 256]", "its data_offsets two of them"),
        ("data_offsets", "[0, 256.0]", "its data_offsets two of them"),
        ("data_offsets", "[0, 128, 256]", "its data_offsets two of them"),
        ("data_offsets", f"[0, {'9' * 4300}]", "its data_offsets two of them"),
        ("data_offsets", "[0, 9223372036854775807]", "was cut off: model.norm.weight should end at byte"),
        ("dtype", '["F32"]', "the dtype of model.norm.weight must be a name, not ['F32']"),
        ("dtype", '"F\\n32"', "the dtype of model.norm.weight must be a name, not 'F\\n32'"),
        ("dtype", '"F64"', "model.norm.weight has dtype F64, but only F32, BF16, F16 are supported"),
        ("other", DEEP, "is corrupt: its header is not valid JSON"),
    ],
    ids=lambda value: value[:20],
)
def test_a_header_whose_numbers_are_none_is_told(folder: Path, field: str, text: str, expected: str) -> None:
    edit_weights(folder, lambda tensors: None)
    edit_header(folder, lambda header: header["model.norm.weight"].update({field: "@"}), text)
    message = refusal(folder)
    assert f"{folder / 'model.safetensors'}" in message
    assert expected in message


def test_tensors_that_lie_over_each_other_are_refused(folder: Path) -> None:
    edit_weights(folder, lambda tensors: None)
    first, second = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(2))

    def change(header: dict[str, Any]) -> None:
        header[second]["data_offsets"] = header[first]["data_offsets"]

    edit_header(folder, change)
    assert f"model.safetensors is corrupt: {first} and {second} lie over each other" in refusal(folder)


def test_tensors_that_do_not_fit_are_listed_and_counted(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 5)
        for i in range(7):
            tensors[f"extra.{i}"] = torch.zeros(1)

    edit_weights(folder, change)
    message = refusal(folder)
    assert "1 missing (model.norm.weight)" in message
    assert "7 unexpected (extra.0, extra.1, extra.2, extra.3, extra.4, …)" in message
    assert "1 mis-shaped (model.layers.0.mlp.up_proj.weight [3, 5] instead of [72, 64])" in message


def test_any_damage_to_headers_and_config_gives_one_sentence(tmp_path: Path) -> None:
    folder = save_checkpoint(replace(SHAPE, sharded=False), tmp_path)
    weights, config = folder / "model.safetensors", folder / "config.json"
    whole, settings = weights.read_bytes(), json.loads(config.read_text())
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    draw = random.Random(0)
    values = [None, 1, -1, 10**30, 1e30, True, "F32", "U8", [], [1], [-1, -1], [10**30, 10**31], {}, {"a": []}]
    refused = 0
    for _ in range(400):
        damaged, setting = bytearray(whole), dict(settings)
        kind = draw.randrange(3)
        if kind == 0:
            damaged[draw.randrange(8 + length)] = draw.randrange(256)
        elif kind == 1:
            setting[draw.choice(list(setting))] = draw.choice(values)
        else:
            changed = {name: dict(entry) for name, entry in header.items()}
            entry = changed[draw.choice([name for name, entry in changed.items() if entry])]
            entry[draw.choice(list(entry))] = draw.choice(values)
            encoded = json.dumps(changed).encode()
            damaged = bytearray(len(encoded).to_bytes(8, "little") + encoded + whole[8 + length :])
        weights.write_bytes(damaged)
        config.write_text(json.dumps(setting))
        try:
            check_fit(folder, read_config(folder), Checkpoint(folder).entries)
        except LoadError:
            refused += 1
    assert 200 < refused < 400


def test_an_integer_tensor_is_refused(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = torch.zeros(64, dtype=torch.int32)

    edit_weights(folder, change)
    assert "model.norm.weight has dtype I32, but only F32, BF16, F16 are supported" in refusal(folder)


def test_a_single_file_and_shards_hold_the_same_model(folder: Path, pristine: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(160, 64)}))  # tied: ignored
    generated = []
    for path in (folder, pristine):
        driver = Driver(make_runner(path))
        generated.append(driver.generate([driver.add(0, [5, 6, 7])], 8))
    assert generated[0] == generated[1]


def test_old_field_names_are_read(folder: Path) -> None:
    config = read_config(folder)
    edit_config(folder, dtype="DELETE", torch_dtype="float32", rope_parameters="DELETE", rope_theta=10_000.0)
    assert read_config(folder) == config
    assert config.eos_token_ids == (3,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [9, 3, 999999]}')
    assert read_config(folder).eos_token_ids == (3, 9)
    (folder / "generation_config.json").write_text('{"eos_token_id": "end"}')
    with pytest.raises(LoadError, match=r"generation_config.json: eos_token_id must be"):
        read_config(folder)


@pytest.mark.parametrize(
    ("stored", "asked", "used"),
    [
        (torch.float32, "auto", "float32"),
        (torch.bfloat16, "auto", "bfloat16"),
        (torch.float16, "auto", "float32"),  # held exactly
        (torch.float16, "float16", "float32"),
        (torch.bfloat16, "float32", "float32"),
        (torch.float32, "bfloat16", "bfloat16"),
    ],
)
def test_the_dtype_is_the_checkpoints_unless_another_is_asked_for(
    stored: torch.dtype, asked: str, used: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_checkpoint(SHAPE, tmp_path, stored)
    with caplog.at_level(logging.WARNING):
        info = load(folder, dtype=asked).info
    assert info.dtype == used
    assert ("float16 is computed in float32" in caplog.text) == (stored == torch.float16)


def test_a_model_too_big_for_the_memory_says_how_much_it_needs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("novainfer.kernels.weights.loader.free_bytes", lambda device: 1000)
    message = refusal(folder)
    needed = sum(4 * tensor.numel() for tensor in _tensors(folder)) + 3 * 4 * 256 * 16
    assert f"({needed} and 1000 bytes)" in message


def test_memory_that_runs_out_while_loading_is_said_in_a_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(shape: object, dtype: object, device: object) -> torch.Tensor:
        raise MemoryError("planted")

    monkeypatch.setattr("novainfer.kernels.weights.loader.lazy_zeros", no_room)
    message = "the memory ran out with 0 of 26 tensors of the model read (max_model_len 256): planted"
    assert message in refusal(folder)
    monkeypatch.undo()
    edit_config(folder, max_position_embeddings=2 * 10**9)
    assert "GiB for its weights in float32 and its positions, but only" in refusal(folder)


def _tensors(folder: Path) -> list[torch.Tensor]:
    return [tensor for shard in folder.glob("*.safetensors") for tensor in load_file(shard).values()]


def test_settings_that_do_not_fit_are_refused(folder: Path) -> None:
    assert "max_model_len (300) is more than the 256 tokens" in refusal(folder, max_model_len=300)
    assert "dtype must be auto, float32, bfloat16, float16" in refusal(folder, dtype="int8")
    assert "device must be cpu or cuda" in refusal(folder, device="tpu")
    assert 'must be "0", "1" or "require"' in refusal(folder, native="yes")
    if not torch.cuda.is_available():
        assert "torch finds no CUDA device" in refusal(folder, device="cuda")
    assert "no row-invariant linear kernel" in refusal(folder, batch_invariant=True)


def test_names_that_are_no_model_get_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(tmp_path)) == tmp_path
    (tmp_path / "file").touch()
    for name, expected in [
        (tmp_path / "file", "is a file"),
        ("/no/such/folder", "neither a folder here nor a hub id"),
        ("nonsense", "neither a folder here nor a hub id"),
        ("../up/there", "neither a folder here nor a hub id"),
        ("~nobody-of-this-name/model", "neither a folder here nor a hub id"),
        ("a" * 5000, "neither a folder here nor a hub id"),
        (Path("a" * 5000), "neither a folder here nor a hub id"),
        ("a\0b", "neither a folder here nor a hub id"),
        (f"{'a' * 5000}.gguf", "is not there"),
        (f"{'a' * 3000}/{'b' * 3000}", "the Hugging Face hub did not give it"),
    ]:
        with pytest.raises(LoadError, match=expected) as refused:
            resolve_model(name)
        assert len(str(refused.value)) < 1000
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(LoadError, match="the Hugging Face hub cannot be reached"):
        resolve_model("nobody/nothing")


def test_progress_counts_every_tensor(folder: Path) -> None:
    calls: list[tuple[int, int]] = []
    load(folder, on_progress=lambda done, total: calls.append((done, total)))
    total = len(Checkpoint(folder).entries)
    assert calls == [(i + 1, total) for i in range(total)]


def test_bytes_are_told_in_words() -> None:
    assert [memory.in_words(n) for n in (300_000, 500 << 20, 3 << 29)] == ["0.3 MiB", "500.0 MiB", "1.50 GiB"]


def test_free_memory_is_the_least_of_machine_and_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    machine = memory.free_bytes(cpu)
    assert machine > 1024
    for name, value in (("max", "5000"), ("current", "4500")):
        (tmp_path / f"memory.{name}").write_text(value + "\n")
    (tmp_path / "memory.stat").write_text("anon 4000\ninactive_file 400\n")
    assert memory.free_bytes(cpu) == 900
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_bytes(cpu) > 5000


SMAPS = """\
1000-3000 r-xp 00000000 fe:00 77 /lib/torch.so
Rss:                   8 kB
Anonymous:             0 kB
Swap:                  0 kB
VmFlags: rd ex
3000-5000 r-xp 00000000 fe:00 78 /lib/with a breakpoint.so
Rss:                   8 kB
Anonymous:             4 kB
Swap:                  0 kB
VmFlags: rd ex
b000-c000 r-xp 00000000 fe:00 78 /lib/with one that is swapped out.so
Anonymous:             0 kB
Swap:                  4 kB
5000-6000 r--p 00000000 fe:00 77 /lib/torch.so
Anonymous:             0 kB
Swap:                  0 kB
6000-7000 rw-p 00000000 fe:00 77 /lib/torch.so
Anonymous:             0 kB
Swap:                  0 kB
7000-8000 r-xp 00000000 00:00 0 [vdso]
Anonymous:             0 kB
Swap:                  0 kB
8000-9000 r-xp 00000000 00:00 0{space}
Anonymous:             0 kB
Swap:                  0 kB
9000-a000 r-xp 00000000 fe:00 79                         /lib/of spaces.so (deleted)
Anonymous:             0 kB
Swap:                  0 kB
c000-d000 r--p 00000000 fe:00 77 /lib/torch.so, relocated
Anonymous:             4 kB
Swap:                  0 kB
d000-e000 r--p 00000000 fe:00 80 /model/weights.pack
Anonymous:             0 kB
Swap:                  0 kB
""".format(space=" ")


def test_pages_of_libraries_are_let_go_only_where_a_file_holds_all_of_them() -> None:
    assert memory._clean_mappings(SMAPS) == [(0x1000, 0x3000), (0x5000, 0x6000), (0x9000, 0xA000)]


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
def test_code_that_was_let_go_runs_again() -> None:
    def code_kb() -> int:
        return int(next(x for x in Path("/proc/self/status").read_text().splitlines() if "RssFile" in x).split()[1])

    weight = torch.ones(8, 8)
    before, product = code_kb(), weight @ weight
    memory.release_library_pages()
    assert code_kb() < before / 2
    assert torch.equal(weight @ weight, product)


def test_memory_moved_to_huge_pages_holds_what_it_held() -> None:
    weight = torch.arange(3 * 2**20, dtype=torch.int32)
    memory.use_huge_pages(weight.data_ptr(), weight.nbytes)
    memory.use_huge_pages(weight.data_ptr() + 4, 100)  # smaller than a page
    assert torch.equal(weight, torch.arange(3 * 2**20, dtype=torch.int32))
