# SPDX-License-Identifier: Apache-2.0
"""Torch's layers under gnsfast's name. They are those of ``torch.nn`` in everything: any model is
measured as it is, and they only say of a model that it is made to be measured.
"""

from torch import nn


class Embedding(nn.Embedding):
    """``torch.nn.Embedding``.

    >>> layer = gnsfast.Embedding(4, 3)
    >>> with gnsfast.per_sample_sqnorms(layer, 3) as norms:
    ...     layer(torch.randint(4, (3, 7))).sum().backward()
    >>> norms.total().shape
    torch.Size([3])
    """


class EmbeddingBag(nn.EmbeddingBag):
    """``torch.nn.EmbeddingBag``. Each bag is a sample.

    >>> layer = gnsfast.EmbeddingBag(4, 3, mode="sum")
    >>> with gnsfast.per_sample_sqnorms(layer, 3) as norms:
    ...     layer(torch.randint(4, (3, 7))).sum().backward()
    >>> norms.total().shape
    torch.Size([3])
    """


class LayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm``.

    >>> layer = gnsfast.LayerNorm(5)
    >>> with gnsfast.per_sample_sqnorms(layer, 3) as norms:
    ...     layer(torch.randn(3, 7, 5)).sum().backward()
    >>> norms.total().shape
    torch.Size([3])
    """


class RMSNorm(nn.RMSNorm):
    """``torch.nn.RMSNorm``.

    >>> layer = gnsfast.RMSNorm(5)
    >>> with gnsfast.per_sample_sqnorms(layer, 3) as norms:
    ...     layer(torch.randn(3, 7, 5)).sum().backward()
    >>> norms.total().shape
    torch.Size([3])
    """


class Bilinear(nn.Bilinear):
    """``torch.nn.Bilinear``.

    >>> layer = gnsfast.Bilinear(5, 4, 2)
    >>> with gnsfast.per_sample_sqnorms(layer, 3) as norms:
    ...     layer(torch.randn(3, 7, 5), torch.randn(3, 7, 4)).sum().backward()
    >>> norms.total().shape
    torch.Size([3])
    """


class Conv1d(nn.Conv1d):
    """``torch.nn.Conv1d``.

    >>> layer = gnsfast.Conv1d(2, 4, 3)
    >>> with gnsfast.per_sample_sqnorms(layer, 3) as norms:
    ...     layer(torch.randn(3, 2, 8)).sum().backward()
    >>> norms.total().shape
    torch.Size([3])
    """


class Conv2d(nn.Conv2d):
    """``torch.nn.Conv2d``.

    >>> layer = gnsfast.Conv2d(2, 4, 3)
    >>> with gnsfast.per_sample_sqnorms(layer, 3) as norms:
    ...     layer(torch.randn(3, 2, 8, 8)).sum().backward()
    >>> norms.total().shape
    torch.Size([3])
    """


class Conv3d(nn.Conv3d):
    """``torch.nn.Conv3d``.

    >>> layer = gnsfast.Conv3d(2, 4, 3)
    >>> with gnsfast.per_sample_sqnorms(layer, 3) as norms:
    ...     layer(torch.randn(3, 2, 4, 4, 4)).sum().backward()
    >>> norms.total().shape
    torch.Size([3])
    """


class ConvTranspose1d(nn.ConvTranspose1d):
    """``torch.nn.ConvTranspose1d``.

    >>> layer = gnsfast.ConvTranspose1d(2, 4, 3)
    >>> with gnsfast.per_sample_sqnorms(layer, 3) as norms:
    ...     layer(torch.randn(3, 2, 8)).sum().backward()
    >>> norms.total().shape
    torch.Size([3])
    """


class ConvTranspose2d(nn.ConvTranspose2d):
    """``torch.nn.ConvTranspose2d``.

    >>> layer = gnsfast.ConvTranspose2d(2, 4, 3)
    >>> with gnsfast.per_sample_sqnorms(layer, 3) as norms:
    ...     layer(torch.randn(3, 2, 8, 8)).sum().backward()
    >>> norms.total().shape
    torch.Size([3])
    """


class ConvTranspose3d(nn.ConvTranspose3d):
    """``torch.nn.ConvTranspose3d``.

    >>> layer = gnsfast.ConvTranspose3d(2, 4, 3)
    >>> with gnsfast.per_sample_sqnorms(layer, 3) as norms:
    ...     layer(torch.randn(3, 2, 4, 4, 4)).sum().backward()
    >>> norms.total().shape
    torch.Size([3])
    """


class GroupNorm(nn.GroupNorm):
    """``torch.nn.GroupNorm``.

    >>> layer = gnsfast.GroupNorm(2, 4)
    >>> with gnsfast.per_sample_sqnorms(layer, 3) as norms:
    ...     layer(torch.randn(3, 4, 7)).sum().backward()
    >>> norms.total().shape
    torch.Size([3])
    """


class InstanceNorm1d(nn.InstanceNorm1d):
    """``torch.nn.InstanceNorm1d``.

    >>> layer = gnsfast.InstanceNorm1d(4, affine=True)
    >>> with gnsfast.per_sample_sqnorms(layer, 3) as norms:
    ...     layer(torch.randn(3, 4, 7)).sum().backward()
    >>> norms.total().shape
    torch.Size([3])
    """


class InstanceNorm2d(nn.InstanceNorm2d):
    """``torch.nn.InstanceNorm2d``.

    >>> layer = gnsfast.InstanceNorm2d(4, affine=True)
    >>> with gnsfast.per_sample_sqnorms(layer, 3) as norms:
    ...     layer(torch.randn(3, 4, 7, 7)).sum().backward()
    >>> norms.total().shape
    torch.Size([3])
    """


class InstanceNorm3d(nn.InstanceNorm3d):
    """``torch.nn.InstanceNorm3d``.

    >>> layer = gnsfast.InstanceNorm3d(4, affine=True)
    >>> with gnsfast.per_sample_sqnorms(layer, 3) as norms:
    ...     layer(torch.randn(3, 4, 2, 3, 4)).sum().backward()
    >>> norms.total().shape
    torch.Size([3])
    """


class BatchNorm1d(nn.BatchNorm1d):
    """``torch.nn.BatchNorm1d``. It has norms in evaluation mode only, because the statistics of a
    batch tie its samples together.

    >>> layer = gnsfast.BatchNorm1d(4).eval()
    >>> with gnsfast.per_sample_sqnorms(layer, 3) as norms:
    ...     layer(torch.randn(3, 4, 7)).sum().backward()
    >>> norms.total().shape
    torch.Size([3])
    """


class BatchNorm2d(nn.BatchNorm2d):
    """``torch.nn.BatchNorm2d``. It has norms in evaluation mode only, because the statistics of a
    batch tie its samples together.

    >>> layer = gnsfast.BatchNorm2d(4).eval()
    >>> with gnsfast.per_sample_sqnorms(layer, 3) as norms:
    ...     layer(torch.randn(3, 4, 7, 7)).sum().backward()
    >>> norms.total().shape
    torch.Size([3])
    """


class BatchNorm3d(nn.BatchNorm3d):
    """``torch.nn.BatchNorm3d``. It has norms in evaluation mode only, because the statistics of a
    batch tie its samples together.

    >>> layer = gnsfast.BatchNorm3d(4).eval()
    >>> with gnsfast.per_sample_sqnorms(layer, 3) as norms:
    ...     layer(torch.randn(3, 4, 2, 3, 4)).sum().backward()
    >>> norms.total().shape
    torch.Size([3])
    """


class SyncBatchNorm(nn.SyncBatchNorm):
    """``torch.nn.SyncBatchNorm``. It has norms in evaluation mode only, because the statistics of a
    batch tie its samples together.
    """


class MultiheadAttention(nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention``.

    >>> layer = gnsfast.MultiheadAttention(8, 2, batch_first=True)
    >>> x = torch.randn(3, 7, 8)
    >>> with gnsfast.per_sample_sqnorms(layer, 3) as norms:
    ...     layer(x, x, x)[0].sum().backward()
    >>> norms.total().shape
    torch.Size([3])
    """
