"""The file that a batch writes: what earlier runs have left in it is not done again.

A line is known again by its record's digest, wherever it stands and wherever its record stands now. Answers are added
at the end as they come; when all records have one and the order is not that of the input, the file is written anew.
An error counts as no answer: its record is tried again, and its line replaced.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from io import FileIO
from pathlib import Path

from novainfer import InvalidParameter
from novainfer.server.cli.batch_records import Result, known, moved

Place = tuple[int, int]  # of a line in the file: its first byte, and its length with the line's end


class BatchOutput:
    """The output at `path`, opened and read; closed by `close`. Raises `InvalidParameter` in one sentence.

    A last line that was cut off is removed. Nothing else is changed before the first result is added.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._answers: defaultdict[str, deque[Place]] = defaultdict(deque)  # by digest
        self._errors: defaultdict[str, deque[Place]] = defaultdict(deque)
        self._lines: list[tuple[str, int]] = []  # digest and first byte of each line, as they stand
        self._end = 0
        try:
            self._file: FileIO = path.open("ab", buffering=0)
        except OSError as error:
            raise self._unwritable(error) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except BlockingIOError:
            self._file.close()
            raise InvalidParameter(f"output {path} is being written by another run", param="output") from None
        except BaseException:
            self._file.close()
            raise

    @property
    def is_empty(self) -> bool:
        """Whether no earlier run has left anything."""
        return not self._lines

    def num_answered(self, digests: Sequence[str]) -> int:
        """How many of these records have an answer; raises when the file holds answers to others."""
        wanted = Counter(digests)
        others = sum(max(len(places) - wanted[digest], 0) for digest, places in self._answers.items())
        if others:
            raise InvalidParameter(
                f"output {self._path} holds {others} answers that are not for these records, this model and these "
                "defaults: choose another file",
                param="output",
            )
        return sum(map(len, self._answers.values()))

    def answered(self) -> Counter[str]:
        """How many answers there are, by digest."""
        return Counter({digest: len(places) for digest, places in self._answers.items()})

    def add(self, result: Result) -> None:
        """Write one more line."""
        line = result.line + b"\n"
        left = memoryview(line)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise self._unwritable(error) from None
        self._note(result.record.digest, result.is_error, len(line))

    def finish(self, digests: Sequence[str]) -> None:
        """Bring the lines into the order of the records, one for each; all of them have been added."""
        places = [self._take(digest) for digest in digests]
        if [place for place, _ in places] == [place for _, place in self._lines]:
            return
        part = self._path.with_name(self._path.name + ".part")
        try:
            with self._path.open("rb") as source, part.open("wb") as file:
                for index, (at, length) in enumerate(places):
                    source.seek(at)
                    file.write(moved(source.read(length), index).strip() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            part.replace(self._path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise self._unwritable(error) from None

    def close(self) -> None:
        """Let others write the file."""
        self._file.close()

    def _take(self, digest: str) -> Place:
        return (self._answers[digest] or self._errors[digest]).popleft()

    def _read(self) -> None:
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):  # a device, or a pipe: nothing to go on with
            return
        try:
            with self._path.open("rb") as source:
                for number, line in enumerate(source, start=1):
                    if not line.endswith(b"\n"):
                        break
                    found = known(line)
                    if found is None:
                        message = f"output {self._path} holds something else in line {number}: choose another file"
                        raise InvalidParameter(message, param="output")
                    self._note(found.digest, found.is_error, len(line))
            self._file.truncate(self._end)
        except OSError as error:
            raise self._unwritable(error) from None

    def _note(self, digest: str, is_error: bool, length: int) -> None:
        if is_error:
            self._errors[digest].appendleft((self._end, length))  # the newest tells best
        else:
            self._answers[digest].append((self._end, length))
        self._lines.append((digest, self._end))
        self._end += length

    def _unwritable(self, error: OSError) -> InvalidParameter:
        return InvalidParameter(f"output {self._path} cannot be written: {error.strerror}", param="output")
