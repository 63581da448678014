"""The first matrix products of a process are done inside a region: what CUDA libraries keep must not stay in it."""

import lowtide
import torch
from _common import install

device = install()
region = lowtide.OffloadRegion("first products")
other_stream = torch.cuda.Stream() if device.type == "cuda" else None

a = torch.rand(256, 256, device=device)
bias = torch.rand(256, device=device)
with region:
    product = a @ a
    with_bias = torch.addmm(bias, a, a)  # cuBLASLt, where torch takes it
    if other_stream is not None:
        with torch.cuda.stream(other_stream):
            elsewhere = a @ a
expected, expected_with_bias = a.cpu() @ a.cpu(), torch.addmm(bias.cpu(), a.cpu(), a.cpu())

region._native.evict(False)  # refuses if a block of the region is known to no tensor
assert region.resident_bytes == 0
torch.testing.assert_close((a @ a).cpu(), expected)  # the library's memory is where it was left
torch.testing.assert_close(torch.addmm(bias, a, a).cpu(), expected_with_bias)
region.restore()
torch.testing.assert_close(product.cpu(), expected)
torch.testing.assert_close(with_bias.cpu(), expected_with_bias)
if other_stream is not None:
    torch.testing.assert_close(elsewhere.cpu(), expected)
print("done")
