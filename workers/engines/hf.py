"""The `hf` rollout engine: a transformers model sampled with a key-value cache, from which finished rows are dropped."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from tandem.platform.config.schema import ModelConfig, RolloutConfig
from tandem.platform.experience.batch import Prompt, StopReason
from tandem.platform.loop.checksum import checksum
from tandem.platform.loop.protocols import Sampling
from tandem.platform.loop.seeds import mix
from tandem.workers.engines.completion import Sampled
from tandem.workers.engines.continuation import Continuation
from tandem.workers.models.description import end_token_ids
from tandem.workers.models.footprint import model_bytes
from tandem.workers.models.loading import load_policy, model_inputs, saved_tensors
from tandem.workers.models.tokenizer import load_tokenizer

PROBED = (7, 1, 3)  # tokens of the prompts that a cache is tried on
LIKELY = 20  # most likely tokens, which are compared
CACHE_GAP = {torch.float32: 1e-3, torch.bfloat16: 0.5}
"""Nats between a cache and a pass over all tokens that are rounding; wrong positions make more."""


class HFEngine:
    """Samples with a transformers model.

    A response is a function of the weights, its prompt, its sample number and the seed: not of the other rows of the batch,
    nor of how many engines share the work (up to float rounding of the logits).
    """

    continuous: ClassVar[bool] = False

    def __init__(self, path: str, model: ModelConfig, rollout: RolloutConfig, device: torch.device) -> None:
        self.model = load_policy(path, model).to(device).eval().requires_grad_(False)
        self.tokenizer = load_tokenizer(path, trust_remote_code=model.trust_remote_code)
        self.device, self.max_rows = device, rollout.max_batch_sequences
        self.stop_ids = end_token_ids(path, self.tokenizer) | set(rollout.stop_token_ids)
        self.stop, self._skip_special = tuple(rollout.stop), not rollout.keep_special_tokens
        self._set_up()

    def _set_up(self) -> None:
        """What depends on the model at hand."""
        self._turn, self._cache_bytes, self._is_loading = threading.Lock(), 0, False
        has_cache = has_true_cache(self.model, self.device)
        self._decoding: type[_Decoding | _Recomputing] = _Decoding if has_cache else _Recomputing

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Sampled]:
        """The samples of each prompt side by side, in order of the prompts."""
        wanted = [(prompt, number) for prompt in prompts for number in range(sampling.samples)]
        # Rows of similar length run together; a stable order keeps the samples of a prompt in one wave where they fit.
        order = sorted(range(len(wanted)), key=lambda row: len(wanted[row][0].ids))
        results: list[Sampled] = [Sampled() for _ in wanted]
        with self._turn:
            for start in range(0, len(order), self.max_rows):
                wave = order[start : start + self.max_rows]
                for row, sampled in zip(wave, self._wave([wanted[row] for row in wave], sampling), strict=True):
                    results[row] = sampled
        return results

    def load_weights(self, bucket: dict[str, Tensor], verify: bool = True) -> dict[str, int]:
        """Copies tensors into the model by name; with `verify` returns the checksum of each as it now stands here.

        The first of them stops the engine until `finish_weights`.
        """
        if not self._is_loading:
            self._turn.acquire()
            self._is_loading = True
        own, arrived = saved_tensors(self.model), {}
        for name, tensor in bucket.items():
            own[name].data.copy_(tensor)
            if verify:
                arrived[name] = checksum(own[name].data.to(tensor.dtype).cpu())
        return arrived

    def finish_weights(self) -> None:
        """Samples again: nothing is held back, and no cache outlives a call."""
        if self._is_loading:
            self._is_loading = False
            self._turn.release()

    def sleep(self) -> None:
        """Moves the weights out of the device's memory."""
        if self.device.type == "cuda":
            with self._turn:
                self.model.to("cpu")
                torch.cuda.empty_cache()

    def wake(self, what: str) -> None:
        """Moves the weights back where `what` is "weights"; a cache is made with each call."""
        if what == "weights":
            with self._turn:
                self.model.to(self.device)

    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        return model_bytes(self.model)

    def cache_bytes(self) -> int:
        """Bytes of the key-value cache, at its largest so far."""
        return self._cache_bytes

    @torch.inference_mode()
    def _wave(self, wanted: list[tuple[Prompt, int]], sampling: Sampling) -> list[Sampled]:
        results = [Sampled() for _ in wanted]
        if sampling.max_tokens == 0:
            return results
        uniforms = _uniforms(wanted, sampling).to(self.device)
        rows = torch.arange(len(wanted), device=self.device)
        state = self._decoding(self.model, wanted, self.device)
        texts = self._continuations(wanted)
        self._cache_bytes = max(self._cache_bytes, state.cache_bytes())
        for step in range(sampling.max_tokens):
            tokens, logprobs = sample(
                state.logits, sampling.temperature, uniforms[rows, step], top_p=sampling.top_p, top_k=sampling.top_k
            )
            running = []
            triples = zip(rows.tolist(), tokens.tolist(), logprobs.tolist(), strict=True)
            for place, (row, token, logprob) in enumerate(triples):
                results[row].ids.append(token)
                results[row].logprobs.append(logprob)
                if token in self.stop_ids or self._ends_by_text(results[row].ids, texts[row]):
                    results[row].stop = StopReason.STOP
                else:
                    running.append(place)
            if not running or step + 1 == sampling.max_tokens:
                break
            kept = torch.tensor(running, device=self.device)
            rows = rows[kept]
            state.advance(tokens[kept], kept)
            self._cache_bytes = max(self._cache_bytes, state.cache_bytes())
        return results

    def _continuations(self, wanted: list[tuple[Prompt, int]]) -> list[Continuation | None]:
        """What decodes each row's response, where stop strings are looked for."""
        if not self.stop:
            return [None] * len(wanted)
        decode = partial(self.tokenizer.decode, skip_special_tokens=self._skip_special)
        of_prompt = {id(prompt): prompt for prompt, _ in wanted}
        made = {key: Continuation(decode, prompt.ids) for key, prompt in of_prompt.items()}
        return [made[id(prompt)] for prompt, _ in wanted]

    def _ends_by_text(self, ids: list[int], after: Continuation | None) -> bool:
        """Whether the text so far holds a stop string; all of it is decoded, since tokens may depend on earlier ones."""
        if after is None:
            return False
        text = after(ids)
        return any(one in text for one in self.stop)


class _Decoding:
    """The running rows of a wave; `logits` (rows, V) are those of their next token."""

    def __init__(self, model: Any, wanted: list[tuple[Prompt, int]], device: torch.device) -> None:
        self.model = model
        # The samples of a prompt share one pass over it.
        prompts = list({id(prompt): prompt for prompt, _ in wanted}.values())
        place = {id(prompt): number for number, prompt in enumerate(prompts)}
        ids, mask = _left_padded([prompt.ids for prompt in prompts], device)
        output = model(input_ids=ids, attention_mask=mask, position_ids=_positions(mask), use_cache=True, logits_to_keep=1)
        rows = torch.tensor([place[id(prompt)] for prompt, _ in wanted], device=device)
        self.cache = output.past_key_values
        self.cache.batch_select_indices(rows)
        self.logits, self.mask = output.logits[rows, -1], mask[rows]

    def advance(self, tokens: Tensor, kept: Tensor) -> None:
        """Keeps the rows `kept` and feeds each its new token."""
        if len(kept) < len(self.mask):
            self.cache.batch_select_indices(kept)
            self.mask = self.mask[kept]
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(kept), 1)], dim=1)
        output = self.model(
            input_ids=tokens[:, None],
            attention_mask=self.mask,
            position_ids=_positions(self.mask)[:, -1:],
            past_key_values=self.cache,
            use_cache=True,
        )
        self.logits = output.logits[:, -1]

    def cache_bytes(self) -> int:
        """Bytes of what all layers keep."""
        return sum(part.nbytes for layer in self.cache.layers for part in vars(layer).values() if isinstance(part, Tensor))


class _Recomputing:
    """As `_Decoding`, for models without a true cache: every token takes a pass over all before it."""

    def __init__(self, model: Any, wanted: list[tuple[Prompt, int]], device: torch.device) -> None:
        self.model, self.device = model, device
        self.rows = [list(prompt.ids) for prompt, _ in wanted]
        self.logits = self._next()

    def advance(self, tokens: Tensor, kept: Tensor) -> None:
        """Keeps the rows `kept` and adds to each its new token."""
        self.rows = [[*self.rows[row], token] for row, token in zip(kept.tolist(), tokens.tolist(), strict=True)]
        self.logits = self._next()

    def cache_bytes(self) -> int:
        """None."""
        return 0

    def _next(self) -> Tensor:
        """(rows, V) logits of the next token of each row."""
        lengths = torch.tensor([len(row) for row in self.rows])
        width = int(lengths.max())
        tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in self.rows])
        inputs = {name: tensor.to(self.device) for name, tensor in model_inputs(tokens, lengths).items()}
        logits: Tensor = self.model(**inputs, use_cache=False).logits
        return logits[torch.arange(len(self.rows)), lengths - 1]


@torch.inference_mode()
def has_true_cache(model: Any, device: torch.device) -> bool:
    """Whether the model's cache gives the log-probs of a pass over all tokens: tried on rows of several lengths.

    Some models give no cache, or one whose rows cannot be chosen; some count positions of the padding on the left.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(rows, (max(PROBED),), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = [Prompt(tuple(ids[:length]), number, "") for number, length in enumerate(PROBED)]
    wanted = [(prompt, number) for prompt in prompts for number in range(2)]
    try:
        cached, whole = _Decoding(model, wanted, device), _Recomputing(model, wanted, device)
        for step in range(len(PROBED)):
            one, other = (state.logits.float().log_softmax(-1) for state in (cached, whole))
            likely = other.topk(min(LIKELY, rows)).indices
            gap = float((one - other).gather(1, likely).abs().max())
            if not gap <= CACHE_GAP.get(model.dtype, CACHE_GAP[torch.bfloat16]):
                return False
            kept = torch.arange(min(step, 1), len(other), device=device)  # the first row ends before the others
            tokens = other[kept].argmax(-1)
            cached.advance(tokens, kept)
            whole.advance(tokens, kept)
        cached.cache_bytes()
    except Exception:  # whatever the model cannot do, it does not need
        return False
    return True


def sample(
    logits: Tensor, temperature: float, uniforms: Tensor, *, top_p: float = 1.0, top_k: int | None = None
) -> tuple[Tensor, Tensor]:
    """One token per row and its log-prob under the distribution sampled from; temperature 0 takes the most likely.

    Draws by inverting the cumulative distribution: the first token whose cumulative probability exceeds the uniform.
    `cut_logits` says what `top_p` and `top_k` leave of the distribution; with temperature 0 they change nothing.

    Args:
        logits: (rows, V). uniforms: (rows,) float64 in [0, 1).
    """
    scaled = logits.float() / temperature if temperature > 0 else logits.float()
    if temperature > 0 and (top_p < 1 or top_k is not None):
        scaled = cut_logits(scaled, top_p, top_k)
    logprobs = scaled.log_softmax(dim=-1)
    if temperature == 0:
        tokens = logprobs.argmax(dim=-1)
    else:
        cumulative = logprobs.double().exp().cumsum(dim=-1)
        # Scaled by the total, so that rounding can never point past the last token.
        tokens = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True).squeeze(1)
        tokens = tokens.clamp(max=logits.shape[1] - 1)
    return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)


def cut_logits(logits: Tensor, top_p: float, top_k: int | None) -> Tensor:
    """The logits (rows, V) of the tokens that may be sampled; -inf for the others.

    Kept are the `top_k` most likely tokens (None: all), and of their distribution the most likely ones until their
    probability reaches `top_p`, so at least one. Of equally likely tokens the one with the lower id comes first.
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        ordered[:, top_k:] = -torch.inf
    if top_p < 1:
        up_to = ordered.double().softmax(dim=-1).cumsum(dim=-1)
        ordered = ordered.masked_fill(pad(up_to[:, :-1], (1, 0)) >= top_p, -torch.inf)
    return torch.empty_like(logits).scatter_(1, order, ordered)


def _uniforms(wanted: list[tuple[Prompt, int]], sampling: Sampling) -> Tensor:
    """(rows, max_tokens) float64: each row has a random stream of its own."""
    streams = [
        torch.rand(
            sampling.max_tokens,
            dtype=torch.float64,
            generator=torch.Generator().manual_seed(mix(*sampling.seed, prompt.group_id, number)),
        )
        for prompt, number in wanted
    ]
    return torch.stack(streams)


def _left_padded(prompts: list[tuple[int, ...]], device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(len(ids) for ids in prompts)
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts], device=device)
    return ids, mask


def _positions(mask: Tensor) -> Tensor:
    """Position of each token among the real ones of its row; padding on the left counts for nothing."""
    return (mask.cumsum(dim=1) - 1).clamp(min=0)
