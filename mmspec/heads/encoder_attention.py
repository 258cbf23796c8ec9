"""Attention of drafting heads to the states of their target's encoder, ahead of the place that it reads.

A decoder of speech reads the encoder's states from left to right: its last layer attends to the sound of the
token that it predicts. The sounds of the tokens after it follow there, whatever these tokens are, so that
several heads can read them at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool1d, gelu, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from mmspec.targets import CausalTarget
from mmspec.targets.admission import decoder_of

__all__ = ["EncoderAttention"]

DROPOUT = 0.2  # of inputs and updates in training: the heads soon know a few hundred texts by heart
STEP = 18.0  # states of the encoder between two tokens, at first: 0.36 seconds for Whisper


class EncoderAttention(nn.Module):
    """The layer of K heads that attend to an encoder's states, with the shape of a decoder's layer.

    The place that the target reads is the mean of its last layer's attention, which a query computes anew
    from the input of that layer. Head i attends around a learnt distance from there, with a learnt width.

    Args:
        width: of the target's hidden states.
        heads: K.
        attention_heads: heads of the attention.
        inner: width of the feed-forward.
        merged: number of the encoder's states that are averaged into one.
    """

    def __init__(self, width: int, heads: int, attention_heads: int, inner: int, merged: int) -> None:
        super().__init__()
        self.heads, self.attention_heads, self.merged = heads, attention_heads, merged
        self.inputs = nn.Linear(3 * width, heads * width)
        self.place_norm, self.place_query = nn.LayerNorm(width), nn.Linear(width, width)
        self.place_weight = nn.Parameter(torch.zeros(attention_heads))
        steps = torch.arange(1.0, heads + 1)[:, None].repeat(1, attention_heads)
        self.distance = nn.Parameter(steps)  # in STEPs
        self.sharpness = nn.Parameter(torch.zeros(heads, attention_heads))  # log of 1 / width
        self.norm, self.query = nn.LayerNorm(width), nn.Linear(width, width)
        self.key, self.value = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.output = nn.Linear(width, width)
        self.inner_norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, inner),
            nn.Linear(inner, width),
        )
        self.final_norm = nn.LayerNorm(width)
        self.drop = nn.Dropout(DROPOUT)

    @torch.no_grad()
    def imitate(self, target: CausalTarget) -> None:
        """Copy the weights of the target's last layer and final norm, as far as they have the same shapes."""
        decoder = decoder_of(target.model)
        known = {f"layer.{name}": each for name, each in decoder.layers[-1].state_dict().items()}
        known |= {
            f"decoder.{name}": each for name, each in decoder.state_dict().items() if "layers" not in name
        }
        for name, source in (
            ("place_norm", "layer.encoder_attn_layer_norm"),
            ("place_query", "layer.encoder_attn.q_proj"),
            ("norm", "layer.encoder_attn_layer_norm"),
            ("query", "layer.encoder_attn.q_proj"),
            ("key", "layer.encoder_attn.k_proj"),
            ("value", "layer.encoder_attn.v_proj"),
            ("output", "layer.encoder_attn.out_proj"),
            ("inner_norm", "layer.final_layer_norm"),
            ("up", "layer.fc1"),
            ("down", "layer.fc2"),
            ("final_norm", "decoder.layer_norm"),
        ):
            for kind, own in self.get_submodule(name).named_parameters():
                found = known.get(f"{source}.{kind}")
                if found is not None and found.shape == own.shape:
                    own.copy_(found)

    def read(self, states: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the keys and values of the encoder's states, merged.

        Args:
            states: R tensors [1, S_r, d].

        Returns:
            Keys and values [R, S', d], and [R, S'] True where there are any.
        """
        few = [
            avg_pool1d(each.transpose(1, 2), self.merged, ceil_mode=True, count_include_pad=False)[0].T
            for each in states
        ]
        padded = pad_sequence(few, batch_first=True)
        counts = torch.tensor([len(each) for each in few], device=padded.device)
        present = torch.arange(padded.shape[1], device=padded.device) < counts[:, None]
        return self.key(padded), self.value(padded), present

    def forward(
        self, features: Tensor, embeddings: Tensor, keys: Tensor, values: Tensor, present: Tensor
    ) -> Tensor:
        """Return a state for each head at each of n places, as the target's final states are.

        Args:
            features: [R, n, 2 d] the target's states before each place: the input of its last layer, and the
                final state.
            embeddings: [R, n, d] of the tokens there.
            keys, values, present: from `read`.

        Returns:
            [R, n, K, d].
        """
        (rows, count), heads = features.shape[:2], self.heads
        states = self.inputs(self.drop(torch.cat([features, embeddings], -1))).unflatten(-1, (heads, -1))
        key, value = self._split(keys), self._split(values)
        inside = present[:, None, None]  # [R, 1, 1, S']
        before = self.place_query(self.place_norm(features[..., : keys.shape[-1]]))
        seen = (self._split(before) @ key.transpose(2, 3)) * key.shape[-1] ** -0.5  # [R, a, n, S']
        places = torch.arange(keys.shape[1], device=keys.device) * (self.merged / STEP)
        centre = seen.masked_fill(~inside, -torch.inf).float().softmax(-1) @ places  # [R, a, n]
        centre = torch.einsum("ran,a->rn", centre, self.place_weight.float().softmax(0))
        goal = centre[:, None, :, None] + self.distance.T[:, None]  # [R, a, n, K]
        away = (places - goal[..., None]) * self.sharpness.T.exp()[:, None, :, None]
        bias = (-0.5 * away.square()).flatten(2, 3).masked_fill(~inside, -torch.inf)
        asked = self._split(self.query(self.norm(states)).flatten(1, 2))
        heard = scaled_dot_product_attention(asked, key, value, bias.to(states.dtype))  # [R, a, n K, d / a]
        read = self.output(heard.transpose(1, 2).flatten(2)).view(rows, count, heads, -1)
        states = states + self.drop(read)
        states = states + self.drop(self.down(gelu(self.up(self.inner_norm(states)))))
        final: Tensor = self.final_norm(states)
        return final

    def _split(self, states: Tensor) -> Tensor:
        """[R, n, d] -> [R, a, n, d / a]."""
        parts: Tensor = states.unflatten(-1, (self.attention_heads, -1))
        return parts.transpose(1, 2)
