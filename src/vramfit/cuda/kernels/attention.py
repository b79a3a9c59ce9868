"""The attention kernels: what they ask for around their outputs."""

from vramfit.cuda.kernels.script import KernelCall, Script, TensorSpec, ceil_div, kernel

ACCUMULATOR_BYTES = 4
CUDNN_FORWARD_WORKSPACE_BYTES = 256


@kernel("_scaled_dot_product_cudnn_attention")
def cudnn_forward(call: KernelCall, script: Script) -> None:
    """cudnn/MHA.cpp (2.11): seed and offset on the device, then output, logsumexp and a small workspace."""
    script.out(6)
    script.out(7)
    script.out(0)
    if call.outputs[1] is not None:
        script.out(1)
    script.scratch(CUDNN_FORWARD_WORKSPACE_BYTES)


@kernel("_scaled_dot_product_cudnn_attention_backward")
def cudnn_backward(call: KernelCall, script: Script) -> None:
    """A workspace for dq in fp32 and the row sums (seen on sm_90; cuDNN 9).

    Where heads share keys, gradients of keys and values are made for every head of the queries first (not measured).
    """
    query, key, value = call.args[1:4]
    for index in range(3):
        script.out(index)
    batch, heads, length, size = query.shape
    needed = batch * heads * length * (size + 1) * ACCUMULATOR_BYTES + CUDNN_FORWARD_WORKSPACE_BYTES
    if heads != key.shape[1]:
        needed += batch * heads * key.shape[2] * (size + value.shape[3]) * key.itemsize
    script.scratch(needed)


@kernel("_scaled_dot_product_efficient_attention")
def efficient_forward(call: KernelCall, script: Script) -> None:
    """transformers/cuda/attention.cu (2.11): seed and offset stay on the host."""
    script.out(0)
    logsumexp = call.outputs[1]
    if logsumexp is not None and logsumexp.numel:
        script.out(1)


@kernel("_scaled_dot_product_efficient_attention_backward")
def efficient_backward(call: KernelCall, script: Script) -> None:
    """transformers/cuda/attention_backward.cu (2.11)."""
    grad, query, key, value = call.args[:4]
    batch, heads, num_queries, size = query.shape
    copy = None
    if not _is_row_major(grad):
        copy = script.temp(grad.nbytes)
    for index, output in enumerate(call.outputs):
        if output is not None:
            script.out(index)
    rows = batch * heads * num_queries * ACCUMULATOR_BYTES
    if query.itemsize == 4:
        product = script.temp(rows * value.shape[3])
        total = script.temp(rows)
        delta = script.temp(rows)
        script.free(total, product)
    else:
        delta = script.temp(rows)
    workspace = script.temp(
        batch
        * heads
        * efficient_workspace_bytes(num_queries, key.shape[2], size, value.shape[3], query.itemsize, batch * heads)
    )
    script.free(delta, workspace)
    if copy is not None:
        script.free(copy)


def efficient_workspace_bytes(
    num_queries: int, num_keys: int, size: int, value_size: int, itemsize: int, num_heads: int
) -> int:
    """AttentionBackwardKernel::workspace_elements_gk/gq (kernel_backward.h), bytes for one head."""
    widest = max(size, value_size)
    block_queries, block_keys = (64, 64) if widest <= 64 else (128, 64)
    max_size = next((m for m in (32, 64, 128) if widest <= m), 65536)
    query_elements = ceil_div(num_queries, block_queries) * ceil_div(size, 64) * (16 + block_queries * 64 * 4) // 4
    key_elements = 0
    if itemsize == 2 and max_size > block_queries:  # the accumulators do not stay in registers
        splits = max(1, min(ceil_div(num_keys, block_keys), 200 // num_heads))
        columns = ceil_div(size, block_queries) + ceil_div(value_size, block_queries)
        key_elements = splits * ceil_div(num_keys, block_keys) * block_keys * columns * block_queries
    return ceil_div(query_elements + key_elements, 4) * 4 * ACCUMULATOR_BYTES


@kernel("_scaled_dot_product_flash_attention")
def flash_forward(call: KernelCall, script: Script) -> None:
    """flash_attn/flash_api.cpp (2.11), mha_fwd: output, logsumexp, then the random state when it drops."""
    script.out(0)
    script.out(1)
    for index in (6, 7):
        if len(call.outputs) > index and call.outputs[index] is not None:
            script.out(index)


@kernel("_scaled_dot_product_flash_attention_backward")
def flash_backward(call: KernelCall, script: Script) -> None:
    """flash_attn/flash_api.cpp (2.11), mha_bwd: row sums and dq in fp32, both rounded up to blocks.

    Where heads share keys, gradients of keys and values are made for every head of the queries, and summed.
    """
    query, key = call.args[1:3]
    batch, heads, length, size = query.shape
    rounded_length = ceil_div(length, 128) * 128
    rounded_size = ceil_div(size, 32) * 32 if size <= 128 else ceil_div(size, 64) * 64
    for index in range(3):
        script.out(index)
    rows = batch * heads * rounded_length * ACCUMULATOR_BYTES
    row_sums = script.temp(rows)
    sums = script.temp(rows * rounded_size)
    if heads != key.shape[1]:
        expanded = batch * key.shape[2] * heads * size * key.itemsize
        script.free(script.temp(expanded), script.temp(expanded))
    script.free(sums, row_sums)


@kernel("_flash_attention_forward")
def packed_forward(call: KernelCall, script: Script) -> None:
    """flash_attn/flash_api.cpp (2.11), mha_varlen_fwd: output, logsumexp, random state."""
    for index in range(4):
        script.out(index)


@kernel("_flash_attention_backward")
def packed_backward(call: KernelCall, script: Script) -> None:
    """flash_attn/flash_api.cpp (2.11), mha_varlen_bwd: row sums and dq in fp32, a block of rows more a sequence."""
    query: TensorSpec = call.args[1]
    num_tokens, heads, size = query.shape
    num_sequences = call.args[6].shape[0] - 1
    rounded_size = ceil_div(size, 32) * 32 if size <= 128 else ceil_div(size, 64) * 64
    for index in range(3):
        script.out(index)
    rows = (num_tokens + 128 * num_sequences) * heads * ACCUMULATOR_BYTES
    held = [script.temp(rows), script.temp(rows * rounded_size)]
    key: TensorSpec = call.args[2]
    if key.shape[1] != heads:  # gradients of keys and values for every head of queries, then summed over their group
        held += [script.temp(key.shape[0] * heads * size * key.itemsize) for _ in range(2)]
    script.free(*reversed(held))


@kernel("_safe_softmax")
def safe_softmax(call: KernelCall, script: Script) -> None:
    """native/transformers/attention.cpp (2.11): the softmax, where its input is -inf, and in which rows all of it."""
    x: TensorSpec = call.args[0]
    softmax, infinity = script.temp(x.nbytes), script.temp(x.itemsize)
    hidden, rows, zero = script.temp(x.numel), script.temp(x.numel // x.shape[-1]), script.temp(x.itemsize)
    script.out()
    script.free(zero, rows, hidden, infinity, softmax)


def _is_row_major(x: TensorSpec) -> bool:
    """Whether [batch, heads, rows, size] lies in memory as [batch, rows, heads, size]."""
    batch, heads, rows, size = range(4)
    order = (batch, rows, heads, size)
    return TensorSpec(
        tuple(x.shape[d] for d in order), tuple(x.stride[d] for d in order), x.dtype, x.itemsize
    ).is_contiguous
