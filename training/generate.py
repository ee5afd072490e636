"""Conversations that the target writes by itself, many at a time, into packed rows.

All rows advance by one token a step. A row that ends a document starts the next one at once, so no step is idle and the
result needs no re-packing. The whole step, with its bookkeeping, is one CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prompts import Head
from target import Target

TEMPLATE, USER, GREEDY, SAMPLED = range(4)  # who chose a token; drafts are learnt on the last two
IM_START, IM_END = "<|im_start|>", "<|im_end|>"


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """How the conversations run."""

    user_limit: int  # tokens of one user's turn
    user_temperature: float
    answer_limits: tuple[int, int]  # tokens of one answer: drawn evenly between these
    sampled_share: float  # share of documents whose answers are sampled rather than greedy
    sampled_temperature: float
    next_turn: float  # chance of another turn after an answer
    long_share: float  # share of rows that begin with one conversation as long as the row


@dataclass(frozen=True, slots=True)
class Markers:
    """Token ids that drive the turns."""

    end_of_turn: int
    end_of_text: int
    to_assistant: tuple[int, ...]  # what follows the end of a user's turn
    to_user: tuple[int, ...]  # what follows the end of an answer, if another turn comes


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows of documents."""

    ids: Tensor  # [R, S] int32
    first: Tensor  # [R, S] int32, start of the document of each position
    kind: Tensor  # [R, S] uint8, TEMPLATE .. SAMPLED

    def rows(self, index: Tensor | slice) -> Packed:
        """Some of the rows."""
        return Packed(self.ids[index], self.first[index], self.kind[index])


class Writer:
    """Generates batches of packed rows; its tensors and its graph are made once."""

    def __init__(
        self, target: Target, heads: list[Head], markers: Markers, settings: GenerationSettings, rows: int, length: int
    ) -> None:
        self._target, self._settings, self._markers = target, settings, markers
        self._rows, self._length, self._heads = rows, length, len(heads)
        device, c = target.device, target.config
        # Scripts are token runs that are forced on a row: every head, then the two changes of speaker.
        scripts = [head.tokens for head in heads] + [markers.to_assistant, markers.to_user]
        width = max(map(len, scripts)) + 1
        table = torch.zeros(len(scripts), width, dtype=torch.int64)
        for index, script in enumerate(scripts):
            table[index, : len(script)] = torch.tensor(script)
        self._script_tokens = table.to(device)
        self._script_length = torch.tensor([len(s) for s in scripts], device=device)
        answers_next = [head.text_only for head in heads] + [True, False]
        self._answers_next = torch.tensor(answers_next, device=device)
        self._one_turn = torch.tensor([head.text_only for head in heads] + [False, False], device=device)
        self._to_assistant, self._to_user = len(heads), len(heads) + 1

        shape = (c.num_layers, rows, c.num_kv_heads, length, c.head_dim)
        self._k = torch.zeros(shape, dtype=target.embed.dtype, device=device)
        self._v = torch.zeros(shape, dtype=target.embed.dtype, device=device)
        self._noise = torch.empty(rows, c.vocab_size, device=device)
        self.ids = torch.zeros(rows, length + 1, dtype=torch.int64, device=device)
        self.first = torch.zeros_like(self.ids)
        self.kind = torch.zeros_like(self.ids)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)

        def state(dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(rows, dtype=dtype, device=device)

        self._script, self._pointer, self._document = state(), state(), state()
        self._spoken, self._limit = state(), state()
        self._answering, self._short = state(torch.bool), state(torch.bool)
        self._next_turn, self._heat, self._answer_heat = (state(torch.float32) for _ in range(3))
        self._graph: torch.cuda.CUDAGraph | None = None

    def write(self, first_heads: Tensor | None = None) -> Packed:
        """One batch of rows. `first_heads` [R] says which head each row begins with; otherwise they are drawn."""
        self._begin(first_heads)
        if self._target.device.type == "cuda" and self._graph is None:
            self._capture()
            self._begin(first_heads)
        for _ in range(self._length - 1):
            if self._graph is None:
                self._advance()
            else:
                self._graph.replay()
        end = self._length
        return Packed(self.ids[:, :end].int(), self.first[:, :end].int(), self.kind[:, :end].to(torch.uint8))

    def _begin(self, first_heads: Tensor | None) -> None:
        everyone = torch.ones(self._rows, dtype=torch.bool, device=self._target.device)
        self._step.zero_()
        self._begin_document(everyone)
        if first_heads is not None:
            self._script.copy_(first_heads)
        long = torch.arange(self._rows, device=self._target.device) < self._settings.long_share * self._rows
        self._next_turn.masked_fill_(long, 1.0)
        self._document.zero_()
        self.kind.zero_()
        self.first.zero_()
        # Index 0 is a document of its own, so that the first head is forced from its first token like all others.
        self.ids[:, 0] = self._markers.end_of_text

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # compiles and warms up outside the capture
                self._advance()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._advance()

    def _begin_document(self, where: Tensor) -> None:
        """Draw a head and the character of the conversation for these rows."""
        s, random = self._settings, lambda: torch.rand(self._rows, device=self._target.device)
        self._script.copy_(torch.where(where, (random() * self._heads).long(), self._script))
        self._pointer.masked_fill_(where, 0)
        self._next_turn.copy_(torch.where(where, s.next_turn, self._next_turn))
        sampled = random() < s.sampled_share
        self._answer_heat.copy_(torch.where(where, sampled * s.sampled_temperature, self._answer_heat))

    def _advance(self) -> None:
        m, s, rows = self._markers, self._settings, self._rows
        step = self._step
        current = self.ids.index_select(1, step)[:, 0]
        first = self.first.index_select(1, step)[:, 0]
        logits = self._target.decode(current, step, first, self._k, self._v)
        # argmax(logits - heat log(exponential noise)) is a sample at that temperature, and the argmax at 0.
        self._noise.exponential_().log_()
        chosen = logits.float().addcmul_(self._heat[:, None], self._noise, value=-1).argmax(-1)

        forced = self._pointer < self._script_length[self._script]
        new_document = forced & (self._pointer == 0) & (self._script < self._heads)
        scripted = self._script_tokens[self._script, self._pointer.clamp(max=self._script_tokens.shape[1] - 1)]
        cut = ~forced & (self._spoken + 1 >= self._limit)
        chosen = torch.where(cut & ~self._answering, m.end_of_turn, chosen)
        token = torch.where(forced, scripted, chosen)
        speaker = torch.where(self._answering, torch.where(self._heat > 0, SAMPLED, GREEDY), USER)
        step.add_(1)
        self._document.copy_(torch.where(new_document, step.expand(rows), self._document))
        self.ids.index_copy_(1, step, token[:, None])
        self.first.index_copy_(1, step, self._document[:, None])
        self.kind.index_copy_(1, step, torch.where(forced, TEMPLATE, speaker)[:, None])
        self._pointer.add_(forced.long())
        self._spoken.add_((~forced).long())

        # A script's last token hands over to a speaker.
        handover = forced & (self._pointer == self._script_length[self._script])
        answers = self._answers_next[self._script]
        low, high = s.answer_limits
        draw = (torch.rand(rows, device=step.device) * (high - low + 1)).long() + low
        draw = torch.where(self._next_turn >= 1, self._length, draw)  # nothing cuts a long conversation
        self._answering.copy_(torch.where(handover, answers, self._answering))
        self._limit.copy_(torch.where(handover, torch.where(answers, draw, s.user_limit), self._limit))
        self._heat.copy_(torch.where(handover, torch.where(answers, self._answer_heat, s.user_temperature), self._heat))
        self._spoken.masked_fill_(handover, 0)
        # A text that began without a turn of its own has no second turn.
        self._short.copy_(
            torch.where(handover & (self._script < self._heads), self._one_turn[self._script], self._short)
        )

        closed = ~forced & ((token == m.end_of_turn) | (token == m.end_of_text))
        again = torch.rand(rows, device=step.device) < self._next_turn
        to_assistant = closed & ~self._answering
        to_user = closed & self._answering & again & ~self._short
        self._script.copy_(torch.where(to_assistant, self._to_assistant, self._script))
        self._script.copy_(torch.where(to_user, self._to_user, self._script))
        self._pointer.masked_fill_(to_assistant | to_user, 0)
        self._begin_document((closed | cut) & ~to_assistant & ~to_user)
