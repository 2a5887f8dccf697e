"""For people who embed the engine and test what they build on it: a device and a tokenizer without weights.

engine = Engine(EngineConfig(max_num_seqs=8), device=FakeDevice(), tokenizer=ByteTokenizer())

The device answers at once with a fixed function of the last token, so answers are known beforehand and a test needs
neither weights nor patience. `Device` and `Tokenizer` are the protocols to implement for anything else. A worker in a
process makes its device there: `FactorySpec("package.module:function", {"argument": 1})` says how.

`replay_recording(data)` runs a file of the flight recorder again, as `novainfer replay` does: without a model, without
a device, and without running anything that the file says.
"""

from novainfer.actors.device.device import Device
from novainfer.actors.device.fake import EOS, ByteTokenizer, FakeDevice, successor
from novainfer.actors.device.spec import FactorySpec
from novainfer.actors.tokenizer.tokenizer import Tokenizer
from novainfer.fsm.messages.step import StepPlan
from novainfer.fsm.recording.dumpfile import decode_dump
from novainfer.fsm.recording.replay import DamagedRecording, Replayed, replay

__all__ = [
    "EOS",
    "ByteTokenizer",
    "DamagedRecording",
    "Device",
    "FactorySpec",
    "FakeDevice",
    "Replayed",
    "StepPlan",
    "Tokenizer",
    "replay_recording",
    "successor",
]


def replay_recording(data: bytes) -> Replayed:
    """What happens when the recording in `data` is run again, with a check of who owns what after each message.

    Raises `DamagedRecording` when it cannot be read.
    """
    image, _ = decode_dump(data)
    return replay(image, check=True)
