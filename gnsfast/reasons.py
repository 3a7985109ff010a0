# SPDX-License-Identifier: Apache-2.0
"""The reasons for which a parameter has no per-sample norms, each with what to write instead."""

from typing import Any, NamedTuple


class Reason(NamedTuple):
    """What happened, what to write instead, and the ``section`` of ``docs/how-to/left-out.md``."""

    sentence: str
    remedy: str
    section: str

    def text(self, **facts: Any) -> str:
        """The reason of one parameter."""
        return f"{self.sentence}. {self.remedy}".format(**facts)


PARTS = "models-that-are-called-by-their-parts"
BATCHES = "other-batches"
MEETING = "what-has-no-per-sample-gradient"
WEIGHTS = "a-penalty-on-the-weights"
KERNELS = "kernels-that-are-not-torchs"
FUNCTIONS = "functions-to-write-in-another-way"
RAGGED = "samples-of-unequal-length"

TAKE = "gnsfast.learn(model, batch, take=lambda batch, samples: ...)"
"""The line by which a user says where the samples are."""

PENALTY_ON_WEIGHTS = Reason(
    "{function} adds it to a number of the whole batch, as a penalty on "
    "the weights does, which belongs to no sample",
    "Leave the penalty out of this loss, and call penalty.backward() after the block: its gradient "
    "is added to those of the samples. Where the model adds it, as AdaLoRA does to the loss of "
    "labels, call it without labels, and compute the loss of its logits",
    WEIGHTS,
)
OF_NO_SAMPLE = Reason(
    "a loss in the block is made of parameters alone, and perhaps of means over the batch, and "
    "belongs to no sample",
    "Of a penalty, call penalty.backward() after the block. If it is the weight of a loss, "
    "multiply the loss of each sample by it, before the mean",
    WEIGHTS,
)
ADDED_TO_SAMPLES = Reason(
    "{function} joins it in the block with data of shape {shapes}, in a call that the batch did "
    "not show",
    "Of a penalty on the weights in the loss, call penalty.backward() after the block. Otherwise "
    "gnsfast.learn(model, batch, run=step) shows the call, with a function step(batch) that "
    "returns the loss of each sample",
    WEIGHTS,
)
NO_BATCH = Reason(
    "no batch has shown the model, which was not called in this block: its part was, with data of "
    "shape {shapes} for {function}",
    "gnsfast.learn(model, batch) shows where its samples are; where the model is called by its "
    "parts, gnsfast.learn(model, batch, run=step) does, with a function step(batch) that returns "
    "what the loss is made of for each sample",
    PARTS,
)
OTHER_CALL = Reason(
    "{function} takes it with data of shape {shapes}, and this is not as in the table of the "
    "model: it was learnt from a batch in which the call was another",
    "Show this batch too: table | gnsfast.learn(model, batch). Where the model is called by its "
    "parts: gnsfast.learn(model, batch, run=step), with a function step(batch) that returns what "
    "the loss is made of for each sample",
    BATCHES,
)
NO_RESULT = Reason(
    "no result of the model belongs to single samples",
    "With gnsfast.learn(model, batch, run=...) a function that returns something of each sample, "
    "such as logits, proves them",
    PARTS,
)
UNCLEAR = Reason(
    "dimensions 0 and 1 of the batch have as many entries, and along the first one samples meet",
    f"If they lie along the other, {TAKE} says so",
    BATCHES,
)
UNREACHED = Reason(
    "no sample of the batch has reached it",
    "Show a batch that does: gnsfast.learn(model, batch) | gnsfast.learn(model, another)",
    BATCHES,
)
NO_GRADIENT = Reason(
    "the batch gives it no gradient",
    "Show a batch that does: gnsfast.learn(model, batch) | gnsfast.learn(model, another). If a "
    "function of your own runs it again in backward, use torch.utils.checkpoint.checkpoint(..., "
    "use_reentrant=False) there",
    BATCHES,
)
DIFFERS = Reason(
    "its norm for a sample is {norm:.6g}, and {real:.6g} for the same sample alone: samples meet "
    "in the model, or were not told apart",
    f"Use a layer that looks at one sample at a time. If the batch is in another form, {TAKE} says "
    "where its samples are",
    MEETING,
)
MIXED = Reason(
    "a loss of some samples gives others a gradient of it: samples meet in the model, or have "
    "another order in it than in the batch",
    "Use a layer that looks at one sample at a time, and sort samples before the model gets them",
    MEETING,
)
UNSEEN = Reason(
    "it gets a gradient, but no function of torch takes it: a kernel or an autograd function of "
    "its own does, or a gradient of its gradient is taken",
    "Use torch's own function there. For a checkpoint of your own this is "
    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
    KERNELS,
)
TWICE = Reason(
    "the model takes a gradient of its gradient, as forces that are one of an energy",
    "GradientNoiseScale(model, unit='micro_batch') needs no per-sample norms",
    "gradients-of-gradients",
)
WRITES = Reason(
    "the model writes it into a tensor of the batch in place, by {function}",
    "Write a new tensor: y = torch.addmm(y, x, w), not y.addmm_(x, w). An embedding with max_norm "
    "writes to its own table: clip that after the step",
    FUNCTIONS,
)
DRAWS = Reason(
    "{function} draws random numbers with it, and a sample alone would get other ones",
    "Draw them in a layer of their own, such as single LSTM layers with torch.nn.Dropout between",
    FUNCTIONS,
)
PACKED_SEQUENCE = Reason(
    "{function} takes it with a sequence of pack_padded_sequence, in which the samples of a time "
    "step lie side by side, and it is not known whose they are",
    "Give the padded batch [B, T, features], and read the state of sample b at its last step: "
    "y[torch.arange(B), lengths - 1]. Later steps then have no loss",
    RAGGED,
)
OTHER_TOKENS = Reason(
    "{function} has no norms for packed documents with data of shape {shapes}: the leading "
    "dimensions do not hold their {sizes} tokens, or the function has no kernel for them",
    "A function without a kernel may take the tokens as one list [N, features], and "
    "rows=owner in the place of cu_seqlens, with the document of each token",
    RAGGED,
)
OTHER_ROWS = Reason(
    "{function} takes it with data of shape {shapes}, which has as many rows as no map of rows= "
    "(they have {sizes})",
    "Give a map for these rows too, with the sample of each: rows=[owner, owner_of_these]",
    RAGGED,
)
TRANSFORM = Reason(
    "a transform of torch.func, such as vmap, takes it, in which no sample is seen",
    "Call the layer with the whole batch: y = x @ w.T, not torch.func.vmap(lambda x: w @ x)(x)",
    FUNCTIONS,
)
COMPLEX = Reason(
    "it has complex numbers, and norms are measured of real ones",
    "Hold its real and imaginary parts as two parameters, and multiply these",
    FUNCTIONS,
)
MADE_COMPLEX = Reason(
    "complex numbers are made of it, and norms are measured of real ones",
    "Multiply real and imaginary parts by themselves, and join the results by torch.complex",
    FUNCTIONS,
)
BY_FREQUENCY = Reason(
    "scale_grad_by_freq divides its gradient by what the whole batch holds",
    "Set scale_grad_by_freq=False: with it no gradient of a single sample exists",
    MEETING,
)
