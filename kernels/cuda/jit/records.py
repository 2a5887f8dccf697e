"""How a row samples, as it lies on the device; and its logits, edited or the model's own.

A record of `RECORD` 64-bit words says how a row samples; floats lie in it as the bits of doubles, lists as addresses.
"""

import triton
import triton.language as tl

RECORD = tl.constexpr(19)  # words of a record
POSITION = tl.constexpr(0)
FLAGS = tl.constexpr(1)
DRAFT = tl.constexpr(2)
HISTORY = tl.constexpr(3)  # address of the sequence's tokens, int32
LISTS = tl.constexpr(4)  # address of: banned ids, stop ids, bias ids, biases (fp32), bits of allowed ids; int32 each
NUM_BANNED = tl.constexpr(5)
NUM_STOPS = tl.constexpr(6)
NUM_BIASES = tl.constexpr(7)
NUM_PROMPT = tl.constexpr(8)
SEED = tl.constexpr(9)
TEMPERATURE = tl.constexpr(10)
TOP_K = tl.constexpr(11)
TOP_P = tl.constexpr(12)
MIN_P = tl.constexpr(13)
REPETITION = tl.constexpr(14)
PRESENCE = tl.constexpr(15)
FREQUENCY = tl.constexpr(16)
LOGPROBS = tl.constexpr(17)  # how many most likely tokens are reported; -1: nothing is
MASK = tl.constexpr(18)  # address of bits of the ids that this step allows, int32

ACTIVE = tl.constexpr(1)  # without it there is no such row: it gets no token, and nothing is written for it
RANDOM = tl.constexpr(2)
CHANGED = tl.constexpr(4)  # its logits are not the model's
ALLOWED = tl.constexpr(8)  # only some ids are
LISTED = tl.constexpr(16)  # it has banned ids, stop ids that count, or biases
STOPS = tl.constexpr(32)  # its stop ids are banned at this position
PENALISED = tl.constexpr(64)
MASKED = tl.constexpr(128)  # it has a MASK

NO_TOKEN = tl.constexpr(-1)
NONE_ALLOWED = tl.constexpr(-2)
NO_ID = tl.constexpr(2147483647)
LOWEST = tl.constexpr(-2147483648)
MINUS_INFINITY = tl.constexpr(-2139095041)  # its `ordered` bits
PROMPT = tl.constexpr(1073741824)  # bit 30 of a count: the token stands in the prompt
ONE = tl.constexpr(1099511627776.0)  # 2**40, which a weight of 1 is in fixed point: 2**22 of them can be summed


@triton.jit
def ordered(x):
    """Bits of fp32 numbers as integers of the same order; both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def whole(record, word):
    """A number of a record, in 32 bits."""
    return tl.load(record + word).to(tl.int32)


@triton.jit
def real(record, word):
    """A float of a record, in fp64."""
    return tl.load(record + word).to(tl.float64, bitcast=True)


@triton.jit
def small_real(record, word):
    """A float of a record, in fp32."""
    return real(record, word).to(tl.float32)


@triton.jit
def address(record, word):
    """A list of int32."""
    return tl.load(record + word).to(tl.pointer_type(tl.int32))


@triton.jit
def logits_at(logits, edited, is_changed, at, inside):
    """Logits of a row in fp32, or of its edited copy; a NaN is infinity, which gives no token either."""
    is_own = (at * 0 + is_changed) != 0  # of that shape: the interpreter makes integers of a bit that it repeats
    model = tl.load(logits + at, inside & (is_own == 0), other=float("-inf")).to(tl.float32)
    own = tl.load(edited + at, inside & is_own, other=float("-inf"))
    found = tl.where(is_own, own, model)
    return tl.where(found != found, float("inf"), found)
