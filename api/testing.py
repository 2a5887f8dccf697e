"""For people who embed the engine and test what they build on it: a device and a tokenizer without weights.

engine = Engine(EngineConfig(max_num_seqs=8), device=FakeDevice(), tokenizer=ByteTokenizer())

The device answers at once with a fixed function of the last token, so answers are known beforehand and a test needs
neither weights nor patience. `Device` and `Tokenizer` are the protocols to implement for anything else.
"""

from novainfer.actors.device import Device
from novainfer.actors.fake import EOS, ByteTokenizer, FakeDevice, successor
from novainfer.actors.tokenizer import Tokenizer
from novainfer.fsm.events import StepPlan

__all__ = ["EOS", "ByteTokenizer", "Device", "FakeDevice", "StepPlan", "Tokenizer", "successor"]
