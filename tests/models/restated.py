"""The published models restated: plain functions of weights, in the order of the papers' code and none of ours."""

import math

import torch
import torch.nn.functional as F


def linear(s, name, x):
    out = x @ s[f"{name}.weight"].T
    return out + s[f"{name}.bias"] if f"{name}.bias" in s else out


def norm(s, name, x, eps=1e-5):
    centred = x - x.mean(-1, keepdim=True)
    out = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * s[f"{name}.weight"]
    return out + s[f"{name}.bias"] if f"{name}.bias" in s else out


def heads(x, n):
    return x.reshape(*x.shape[:2], n, -1).transpose(1, 2)


def merged(x):
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


def weights_of(scores, softmax, causal):
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
    return scores.softmax(-1) if softmax else scores


def subspace_attention(s, project, output, x, n, softmax=True, causal=False):
    w = heads(linear(s, project, x), n)
    out = merged(weights_of(w @ w.mT / math.sqrt(w.shape[-1]), softmax, causal) @ w)
    return linear(s, output, out)


def ista(weight, x, step, lambd):
    coded = x @ weight.T
    return F.relu(x + step * (x @ weight - coded @ weight) - step * lambd)


def overcomplete(code, x, step, lambd, steps):
    """Return z of ``steps`` steps in the dictionary ``code`` (dim, hidden)."""
    z = torch.zeros(*x.shape[:-1], code.shape[1], dtype=x.dtype)
    for _ in range(steps):
        z = F.relu(z + step * (x - z @ code.T) @ code - step * lambd)
    return z


def embedded(s, name, img, patch, cls, positions):
    x = F.conv2d(img, s[f"{name}.weight"], s[f"{name}.bias"], stride=patch).flatten(2).mT
    return torch.cat([s[cls].expand(len(x), 1, -1), x], 1) + s[positions]


def flattened(s, img, patch):
    """CRATE's stem: patches row by row, channel last, between two norms; class token and positions."""
    ph, pw = (patch, patch) if isinstance(patch, int) else patch
    rows, columns = range(0, img.shape[2], ph), range(0, img.shape[3], pw)
    cut = [img[:, :, i : i + ph, j : j + pw].permute(0, 2, 3, 1).reshape(len(img), -1) for i in rows for j in columns]
    x = norm(s, "to_patch_embedding.1", torch.stack(cut, 1))
    x = norm(s, "to_patch_embedding.3", linear(s, "to_patch_embedding.2", x))
    return torch.cat([s["cls_token"].expand(len(x), 1, -1), x], 1) + s["pos_embedding"]


def crate(s, c, img):
    x = flattened(s, img, c.patch_size)
    for i in range(c.depth):
        a, b = f"transformer.layers.{i}.0", f"transformer.layers.{i}.1"
        x = x + subspace_attention(s, f"{a}.fn.qkv", f"{a}.fn.to_out.0", norm(s, f"{a}.norm", x), c.heads)
        x = ista(s[f"{b}.fn.weight"], norm(s, f"{b}.norm", x), c.ista, c.lambd)
    return linear(s, "mlp_head.1", norm(s, "mlp_head.0", x.mean(1) if c.pool == "mean" else x[:, 0]))


def aot_vision(s, c, img):
    x = flattened(s, img, c.patch_size)
    for i in range(c.depth):
        y = F.layer_norm(x, x.shape[-1:], s[f"layers.{i}.norm.weight"], None, 1e-5) if c.norm else x
        x = x + c.eta * subspace_attention(s, f"layers.{i}.attn.qkv", f"layers.{i}.attn.to_out.0", y, c.heads)
    return linear(s, "mlp_head.1", norm(s, "mlp_head.0", x[:, 0]))


def crate_alpha(s, c, img):
    x = embedded(s, "conv1", img, c.patch_size, "cls_token", "pos_embedding")
    for i in range(c.depth):
        a, b = f"transformer.layers.{i}.0", f"transformer.layers.{i}.1"
        y = norm(s, f"{a}.norm", x, 1e-6)
        x = x + subspace_attention(s, f"{a}.fn.qkv", f"{a}.fn.to_out.0", y, c.heads)
        y = norm(s, f"{b}.norm", x, 1e-6)
        x = x + overcomplete(s[f"{b}.fn.D"], y, c.eta, c.lmbda, c.steps) @ s[f"{b}.fn.D1"].T
    return linear(s, "mlp_head.1", norm(s, "mlp_head.0", x[:, 0], c.head_eps))


def crate_mae(s, c, img, mask):
    x = F.conv2d(img, s["patch_embed.proj.weight"], s["patch_embed.proj.bias"], stride=c.patch_size).flatten(2).mT
    x = x * (1 - mask[..., None]) + s["mask_token"] * mask[..., None]
    x = torch.cat([s["cls_token"].expand(len(x), 1, -1), x], 1) + s["decoder_pos_embed"]
    for i in range(c.depth):
        a, b = f"blocks.{i}.layers.0.0", f"blocks.{i}.layers.0.1"
        x = x + subspace_attention(s, f"{a}.fn.qkv", f"{a}.fn.to_out.0", norm(s, f"{a}.norm", x), c.num_heads)
        x = ista(s[f"{b}.fn.weight"], norm(s, f"{b}.norm", x), c.ista, c.lambd)
    x = norm(s, "norm", x, c.norm_eps)
    for i in range(c.decoder_depth):
        a, b = f"decoder_blocks.{i}.layers.0.0", f"decoder_blocks.{i}.layers.0.1"
        y = linear(s, f"{a}.fn", norm(s, f"{a}.norm", x))
        names, z = (f"{b}.fn.qkv", f"{b}.fn.to_out.0"), norm(s, f"{b}.norm", y)
        x = y - subspace_attention(s, *names, z, c.decoder_num_heads, c.use_softmax)
    return linear(s, "decoder_pred", norm(s, "decoder_norm", x, c.norm_eps))[:, 1:]


def token_statistics(s, name, x, n):
    w = heads(linear(s, f"{name}.qkv", x), n)
    energy = w.square() / w.square().sum(-2, keepdim=True)
    member = (energy.sum(-1) * s[f"{name}.temp"]).softmax(1)
    share = member / (member.sum(-1, keepdim=True) + 1e-8)
    moment = (share[..., None] * w.square()).sum(-2, keepdim=True)
    return linear(s, f"{name}.to_out.0", merged(-w * member[..., None] / (1 + moment)))


def mlp(s, first, second, x):
    x = linear(s, first, x)
    return linear(s, second, x * 0.5 * (1 + torch.erf(x / math.sqrt(2))))


def fourier(s, rows, columns):
    """The positions pixel by pixel."""
    out = torch.zeros(64, rows, columns, dtype=torch.float64)
    for i in range(rows):
        for j in range(columns):
            for half, (n, count) in enumerate(((i, rows), (j, columns))):
                for k in range(16):
                    angle = 2 * math.pi * (n + 1) / (count + 1e-6) / 10000 ** (2 * k / 32)
                    out[32 * half + 2 * k, i, j] = math.sin(angle)
                    out[32 * half + 2 * k + 1, i, j] = math.cos(angle)
    return F.conv2d(out[None], s["pos_embeder.token_projection.weight"], s["pos_embeder.token_projection.bias"])


def stem(s, x, halvings):
    for i in range(halvings):
        name = f"patch_embed.proj.{2 * i}"
        x = F.conv2d(x, s[f"{name}.0.weight"], stride=2, padding=1)
        scale = s[f"{name}.1.weight"] / (s[f"{name}.1.running_var"] + 1e-5).sqrt()
        x = (x - s[f"{name}.1.running_mean"][:, None, None]) * scale[:, None, None]
        x = x + s[f"{name}.1.bias"][:, None, None]
        x = F.gelu(x) if i + 1 < halvings else x
    return x


def class_attention(s, c, name, x):
    """``norm1`` is applied before this; patch tokens come back as they are."""
    query, key, value = (heads(part, c.num_heads) for part in linear(s, f"{name}.qkv", x).chunk(3, -1))
    scale = c.qk_scale or query.shape[-1] ** -0.5
    gathered = ((query[:, :, :1] @ key.mT) * scale).softmax(-1) @ value
    return torch.cat([linear(s, f"{name}.proj", merged(gathered)), x[:, 1:]], 1)


def tost(s, c, img):
    x = stem(s, img, int(math.log2(c.patch_size)))
    if c.use_pos:
        x = x + fourier(s, *x.shape[2:])
    x = x.flatten(2).mT
    for i in range(c.depth):
        b = f"blocks.{i}"
        x = x + s[f"{b}.gamma1"] * token_statistics(s, f"{b}.attn", norm(s, f"{b}.norm1", x, 1e-6), c.num_heads)
        y = mlp(s, f"{b}.mlp.fc1", f"{b}.mlp.fc2", norm(s, f"{b}.norm2", x, 1e-6))
        x = x + s[f"{b}.gamma2"] * y
    x = torch.cat([s["cls_token"].expand(len(x), 1, -1), x], 1)
    for i in range(c.cls_attn_layers):
        b = f"cls_attn_blocks.{i}"
        x = x + s[f"{b}.gamma1"] * class_attention(s, c, f"{b}.attn", norm(s, f"{b}.norm1", x, 1e-6))
        normed = norm(s, f"{b}.norm2", x, 1e-6)
        cls, patches = normed[:, :1], normed[:, 1:] if c.tokens_norm else x[:, 1:]
        cls = cls + s[f"{b}.gamma2"] * mlp(s, f"{b}.mlp.fc1", f"{b}.mlp.fc2", cls)
        x = torch.cat([cls, 2 * patches], 1)
    return linear(s, "head", norm(s, "norm", x, 1e-6)[:, 0])


def embedded_text(s, tokens):
    return s["transformer.wte.weight"][tokens] + s["transformer.wpe.weight"][: tokens.shape[1]]


def running_statistics(s, name, x, n):
    w = heads(linear(s, f"{name}.c_attn", x), n)
    energy = w.square() / w.square().cumsum(-2) + s[f"{name}.denom_bias"][:, : x.shape[1]]
    member = (energy.sum(-1) * s[f"{name}.temp"]).softmax(1)
    moment = (member[..., None] * w.square()).cumsum(-2) / (member.cumsum(-1) + 1e-8)[..., None]
    return linear(s, f"{name}.c_proj", merged(-w * member[..., None] / (1 + moment)))


def tost_lm(s, c, tokens):
    x = embedded_text(s, tokens)
    for i in range(c.n_layer):
        b = f"transformer.h.{i}"
        x = x + s[f"{b}.gamma1"] * running_statistics(s, f"{b}.attn", norm(s, f"{b}.ln_1", x), c.n_head)
        x = x + s[f"{b}.gamma2"] * mlp(s, f"{b}.mlp.c_fc", f"{b}.mlp.c_proj", norm(s, f"{b}.ln_2", x))
    return norm(s, "transformer.ln_f", x) @ s["transformer.wte.weight"].T


def crate_lm(s, c, tokens):
    x = embedded_text(s, tokens)
    for i in range(c.n_layer):
        b = f"transformer.h.{i}"
        y = norm(s, f"{b}.prenorm_1", x)
        x = x + subspace_attention(s, f"{b}.attn.c_attn", f"{b}.attn.c_proj", y, c.n_head, causal=True)
        y, weight = norm(s, f"{b}.prenorm_2", x), s[f"{b}.ista.weight"]
        if c.overcomplete:
            x = overcomplete(weight.T, y, c.ista, c.lambd, c.steps) @ weight
        else:
            x = ista(weight, y, c.ista, c.lambd)
    x = norm(s, "transformer.ln_f", x) if c.overcomplete else x
    return x @ s["transformer.wte.weight"].T
