"""One forward pass, in the pieces that lie between two exchanges.

Whoever drives a pass (model.Model.forward) calls `advance`, dispatches what it gets, calls `share`
while the rows are with the experts, and advances with their sum, until it gets logits.
"""

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch.nn.functional as F
from torch import Tensor

from expertmesh.actors.model.batch import Batch, Inputs
from expertmesh.actors.model.layers import Gated, Kda
from expertmesh.actors.model.residual import BlockResidual, PlainResidual, Residual
from expertmesh.actors.model.upload import Uploads
from expertmesh.actors.state.model_state import ModelState
from expertmesh.kernels.linear.torch_ops import MIN_ROWS

if TYPE_CHECKING:
    from expertmesh.actors.model.model import LatentMoe, Model


class Sending(NamedTuple):
    """What goes to the experts of `layer`: latents [T, D], ids int64 and weights fp32 [T, K]."""

    layer: int
    z_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor


class Pass(Protocol):
    def advance(self, routed_TD: Tensor | None) -> Sending | Tensor:
        """Computes up to the next exchange, or to the logits fp32 [R, V].

        routed_TD: fp32 sum over the experts of what was sent last; None the first time.
        """
        ...

    def share(self) -> None:
        """The shared experts of the layer whose rows are on their way."""
        ...


class Runner(Protocol):
    """How passes are computed: call by call, or as recorded graphs."""

    def begin(self, batch: Batch, state: ModelState, micro: int) -> Pass: ...


class EagerRunner:
    """Every operator is called anew in every pass; any batch."""

    def __init__(self, model: "Model", uploads: Uploads) -> None:
        self._model, self._uploads = model, uploads

    def begin(self, batch: Batch, state: ModelState, micro: int) -> Pass:
        words = batch.words(batch.rows, len(batch.decode_spans), batch.most_pages, state.spare_row)
        (sent,) = self._uploads.send(words.flat)
        return Forward(self._model, words.inputs(sent, batch.spans), state)


class Forward:
    """A pass over `inputs`. T rows, padded to MIN_ROWS."""

    def __init__(self, model: "Model", inputs: Inputs, state: ModelState) -> None:
        self._model, self._inputs, self._state = model, inputs, state
        self._plan: Any = None
        if inputs.decode:
            self._plan = model.kernels.mla_plan(inputs.page_table_DN, inputs.lengths_D)
        self._layer = 0
        self._moe: LatentMoe | None = None  # whose rows are with the experts
        self._x_TH: Tensor | None = None  # its input
        self._shared_TH: Tensor | None = None
        self._residual: Residual | None = None

    def advance(self, routed_TD: Tensor | None) -> Sending | Tensor:
        model, eps = self._model, self._model.config.rms_norm_eps
        residual = self._residual = self._residual or self._embed()
        if routed_TD is not None:
            assert self._moe is not None and self._x_TH is not None
            routed_TD = _pad_rows(routed_TD, self._x_TH.shape[0])
            residual.add_ffn(self._moe.finish(routed_TD, self._x_TH, self._shared_TH))
        while self._layer < model.config.num_layers:
            i = self._layer
            self._layer += 1
            self._attend(i, residual)
            x_TH, ffn = residual.ffn_input(i, model.norms[i][1], eps), model.ffn[i]
            if isinstance(ffn, Gated):
                residual.add_ffn(ffn(x_TH))
                continue
            self._moe, self._x_TH, self._shared_TH = ffn, x_TH, None
            sent = ffn.latent(x_TH), *ffn.router(x_TH)
            rows = self._inputs.rows
            return Sending(i, *(sent if rows == x_TH.shape[0] else (x[:rows] for x in sent)))
        wanted_R = self._inputs.logit_rows_R
        last_RH = residual.output()[_padded_index(wanted_R)]
        logits_RV = model.head(model.kernels.rms_norm(last_RH, model.w_norm, eps)).float()
        return logits_RV[: wanted_R.shape[0]]

    @property
    def shares(self) -> bool:
        """Whether the layer whose rows are on their way has shared experts."""
        return self._moe is not None and self._moe.shared is not None

    def share(self) -> None:
        assert self._moe is not None and self._x_TH is not None
        if self._moe.shared is not None:
            self._shared_TH = self._moe.shared(self._x_TH)

    def _attend(self, i: int, residual: Residual) -> None:
        model, inputs, state = self._model, self._inputs, self._state
        state.wait(i)
        attention, at = model.attention[i], model.state_index[i]
        x_TH = residual.attention_input(i, model.norms[i][0], model.config.rms_norm_eps)
        if isinstance(attention, Kda):
            saved = state.saved_conv[at], state.saved_kda[at]
            residual.add_attention(attention(x_TH, inputs, state.conv[at], state.kda[at], saved))
        else:
            residual.add_attention(attention(x_TH, inputs, self._plan, state.caches[at], at))

    def _embed(self) -> Residual:
        model = self._model
        x_TH = _pad_rows(F.embedding(self._inputs.token_ids_T, model.w_embed), MIN_ROWS)
        if model.attn_res is None:
            return PlainResidual(x_TH, model.kernels)
        return BlockResidual(x_TH, model.attn_res, model.kernels)


def _pad_rows(x: Tensor, rows: int) -> Tensor:
    """Zero rows up to at least `rows`."""
    missing = rows - x.shape[0]
    return x if missing <= 0 else F.pad(x, (0, 0, 0, missing))


def _padded_index(rows_R: Tensor) -> Tensor:
    """Repeats row 0 so that the head's matmul has at least MIN_ROWS rows."""
    missing = MIN_ROWS - rows_R.shape[0]
    return rows_R if missing <= 0 else F.pad(rows_R, (0, missing))
