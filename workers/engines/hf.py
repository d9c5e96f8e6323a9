"""The `hf` rollout engine: samples a transformers model with a key-value cache and drops finished rows from the batch."""

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

PROBED = (7, 1, 3)  # lengths in tokens of the prompts that test a cache
LIKELY = 20  # number of most likely tokens whose log-probs are compared
CACHE_GAP = {torch.float32: 1e-3, torch.bfloat16: 0.5}
"""Largest difference, in nats, between cached and uncached log-probs that rounding explains; wrong positions give more."""


class HFEngine:
    """Samples with a transformers model.

    A response depends only on the weights, its prompt, its sample number and the seed. It does not depend on the other rows
    of the batch or on the number of engines (up to float rounding of the logits).
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
        """Sets the attributes that depend on the model."""
        self._turn, self._cache_bytes, self._is_loading = threading.Lock(), 0, False
        has_cache = has_true_cache(self.model, self.device)
        self._decoding: type[_Decoding | _Recomputing] = _Decoding if has_cache else _Recomputing

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Sampled]:
        """The samples in order of the prompts, those of one prompt adjacent."""
        wanted = [(prompt, number) for prompt in prompts for number in range(sampling.samples)]
        # Rows of similar length run together. The sort is stable, so the samples of a prompt share a wave if they fit.
        order = sorted(range(len(wanted)), key=lambda row: len(wanted[row][0].ids))
        results: list[Sampled] = [Sampled() for _ in wanted]
        with self._turn:
            for start in range(0, len(order), self.max_rows):
                wave = order[start : start + self.max_rows]
                for row, sampled in zip(wave, self._wave([wanted[row] for row in wave], sampling), strict=True):
                    results[row] = sampled
        return results

    def load_weights(self, bucket: dict[str, Tensor], verify: bool = True) -> dict[str, int]:
        """Copies tensors into the model by name; with `verify`, returns their checksums as stored in the model.

        The first call blocks sampling until `finish_weights`.
        """
        if not self._is_loading:
            self._turn.acquire()
            self._is_loading = True
        current, arrived = saved_tensors(self.model), {}
        for name, tensor in bucket.items():
            current[name].data.copy_(tensor)
            if verify:
                arrived[name] = checksum(current[name].data.to(tensor.dtype).cpu())
        return arrived

    def finish_weights(self) -> None:
        """Allows sampling again. There is nothing to apply or drop: weights are in place, and no cache outlives a call."""
        if self._is_loading:
            self._is_loading = False
            self._turn.release()

    def sleep(self) -> None:
        """Moves the weights to host memory."""
        if self.device.type == "cuda":
            with self._turn:
                self.model.to("cpu")
                torch.cuda.empty_cache()

    def wake(self, what: str) -> None:
        """Moves the weights back if `what` is "weights"; each call creates its own cache."""
        if what == "weights":
            with self._turn:
                self.model.to(self.device)

    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        return model_bytes(self.model)

    def cache_bytes(self) -> int:
        """Bytes of the key-value cache: the maximum so far."""
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
        """The decoder of each row's response; None without stop strings."""
        if not self.stop:
            return [None] * len(wanted)
        decode = partial(self.tokenizer.decode, skip_special_tokens=self._skip_special)
        of_prompt = {id(prompt): prompt for prompt, _ in wanted}
        made = {key: Continuation(decode, prompt.ids) for key, prompt in of_prompt.items()}
        return [made[id(prompt)] for prompt, _ in wanted]

    def _ends_by_text(self, ids: list[int], after: Continuation | None) -> bool:
        """Whether the text so far contains a stop string. Decodes all of it, since tokens may depend on earlier ones."""
        if after is None:
            return False
        text = after(ids)
        return any(stop in text for stop in self.stop)


class _Decoding:
    """The running rows of a wave; `logits` (rows, V) predict their next tokens."""

    def __init__(self, model: Any, wanted: list[tuple[Prompt, int]], device: torch.device) -> None:
        self.model = model
        # The samples of a prompt share one prefill pass.
        prompts = list({id(prompt): prompt for prompt, _ in wanted}.values())
        place = {id(prompt): number for number, prompt in enumerate(prompts)}
        ids, mask = _left_padded([prompt.ids for prompt in prompts], device)
        output = model(input_ids=ids, attention_mask=mask, position_ids=_positions(mask), use_cache=True, logits_to_keep=1)
        rows = torch.tensor([place[id(prompt)] for prompt, _ in wanted], device=device)
        self.cache = output.past_key_values
        self.cache.batch_select_indices(rows)
        self.logits, self.mask = output.logits[rows, -1], mask[rows]

    def advance(self, tokens: Tensor, kept: Tensor) -> None:
        """Keeps the rows `kept` and feeds each row its new token."""
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
        """Bytes of the cache over all layers."""
        return sum(part.nbytes for layer in self.cache.layers for part in vars(layer).values() if isinstance(part, Tensor))


class _Recomputing:
    """As `_Decoding`, for models without a correct cache: every new token takes a pass over all tokens before it."""

    def __init__(self, model: Any, wanted: list[tuple[Prompt, int]], device: torch.device) -> None:
        self.model, self.device = model, device
        self.rows = [list(prompt.ids) for prompt, _ in wanted]
        self.logits = self._next()

    def advance(self, tokens: Tensor, kept: Tensor) -> None:
        """Keeps the rows `kept` and appends to each row its new token."""
        self.rows = [[*self.rows[row], token] for row, token in zip(kept.tolist(), tokens.tolist(), strict=True)]
        self.logits = self._next()

    def cache_bytes(self) -> int:
        """0: there is no cache."""
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
    """Whether decoding with the model's cache gives the log-probs of a full pass; tests it on rows of several lengths.

    Some models return no cache, or a cache without row selection; some count left padding in their positions.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(rows, (max(PROBED),), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = [Prompt(tuple(ids[:length]), number, "") for number, length in enumerate(PROBED)]
    wanted = [(prompt, number) for prompt in prompts for number in range(2)]
    try:
        cached, whole = _Decoding(model, wanted, device), _Recomputing(model, wanted, device)
        for step in range(len(PROBED)):
            tested, expected = (state.logits.float().log_softmax(-1) for state in (cached, whole))
            likely = expected.topk(min(LIKELY, rows)).indices
            gap = float((tested - expected).gather(1, likely).abs().max())
            if not gap <= CACHE_GAP.get(model.dtype, CACHE_GAP[torch.bfloat16]):
                return False
            kept = torch.arange(min(step, 1), len(expected), device=device)  # the first row ends before the others
            tokens = expected[kept].argmax(-1)
            cached.advance(tokens, kept)
            whole.advance(tokens, kept)
        cached.cache_bytes()
    except Exception:  # any failure means no usable cache; the engine then recomputes
        return False
    return True


def sample(
    logits: Tensor, temperature: float, uniforms: Tensor, *, top_p: float = 1.0, top_k: int | None = None
) -> tuple[Tensor, Tensor]:
    """Samples one token per row, and returns its log-prob under the sampling distribution too; temperature 0 is greedy.

    Inverts the cumulative distribution: takes the first token whose cumulative probability exceeds the uniform.
    `cut_logits` documents `top_p` and `top_k`; they have no effect at temperature 0.

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
        # Uniforms are scaled by the total, because with rounding it may differ from 1.
        tokens = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True).squeeze(1)
        tokens = tokens.clamp(max=logits.shape[1] - 1)
    return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)


def cut_logits(logits: Tensor, top_p: float, top_k: int | None) -> Tensor:
    """The logits (rows, V) with -inf for the tokens that may not be sampled.

    First keeps the `top_k` most likely tokens (None: all), then of these the most likely ones until their cumulative
    probability reaches `top_p`, at least one. Among equally likely tokens, lower ids come first.
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        ordered[:, top_k:] = -torch.inf
    if top_p < 1:
        up_to = ordered.double().softmax(dim=-1).cumsum(dim=-1)
        ordered = ordered.masked_fill(pad(up_to[:, :-1], (1, 0)) >= top_p, -torch.inf)
    return torch.empty_like(logits).scatter_(1, order, ordered)


def _uniforms(wanted: list[tuple[Prompt, int]], sampling: Sampling) -> Tensor:
    """(rows, max_tokens) float64; each row has its own random stream."""
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
    """Position of each token among the real tokens of its row; left padding does not count."""
    return (mask.cumsum(dim=1) - 1).clamp(min=0)
