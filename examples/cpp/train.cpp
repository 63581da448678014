// A LibTorch program whose AdamW state leaves the device between steps. It trains a small network twice from one seed, with the
// state leaving and with it staying, and compares losses, weights and state bit by bit. Exit status 0 if they agree.
// Runs on a GPU, and without one on Lowtide's host device.
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include <lowtide/lowtide.h>

namespace {

constexpr int kSteps = 12;
constexpr std::int64_t kWidth = 256;
constexpr std::int64_t kBatch = 64;

struct Result {
  std::vector<torch::Tensor> losses;
  std::vector<torch::Tensor> weights;
  std::vector<torch::Tensor> state;
  lowtide::Bytes evicted = 0;  // most that was away at a time
};

/// The optimizer's own tensors, in the order of the parameters.
std::vector<torch::Tensor> state_of(const torch::optim::Optimizer& optimizer,
                                    const std::vector<torch::Tensor>& parameters) {
  std::vector<torch::Tensor> tensors;
  for (const torch::Tensor& parameter : parameters) {
    const auto& state =
        static_cast<const torch::optim::AdamWParamState&>(*optimizer.state().at(parameter.unsafeGetTensorImpl()));
    tensors.push_back(state.exp_avg());
    tensors.push_back(state.exp_avg_sq());
  }
  return tensors;
}

std::vector<torch::Tensor> copies_of(const std::vector<torch::Tensor>& tensors) {
  std::vector<torch::Tensor> copies;
  for (const torch::Tensor& tensor : tensors) copies.push_back(tensor.detach().cpu().clone());
  return copies;
}

Result train(const torch::Device& device, bool evict) {
  torch::manual_seed(0);
  torch::nn::Sequential network(torch::nn::Linear(kWidth, 4 * kWidth), torch::nn::GELU(),
                                torch::nn::Linear(4 * kWidth, 4 * kWidth), torch::nn::GELU(),
                                torch::nn::Linear(4 * kWidth, kWidth));
  network->to(device);
  const std::vector<torch::Tensor> parameters = network->parameters();
  torch::optim::AdamW optimizer(parameters, torch::optim::AdamWOptions(1e-3));
  lowtide::Region state("adam");

  Result result;
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor input = torch::randn({kBatch, kWidth}).to(device);
    const torch::Tensor loss = torch::mse_loss(network->forward(input), input.roll(1, 1));
    loss.backward();

    state.restore();  // nothing to do while it is here
    {
      // AdamW makes its state in its first step. What it makes in later steps is temporary and need not be in the region.
      std::optional<lowtide::OffloadRegion> guard;
      if (step == 0) guard.emplace(state);
      optimizer.step();
    }
    optimizer.zero_grad();
    if (evict) state.evict();  // until the restore its memory serves others, and using its tensors throws

    result.evicted = std::max(result.evicted, state.evicted_bytes());
    result.losses.push_back(loss.detach().cpu());
  }
  state.restore();
  result.weights = copies_of(parameters);
  result.state = copies_of(state_of(optimizer, parameters));
  return result;
}

/// Number of tensors that are not equal in every bit.
std::size_t different(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  std::size_t count = a.size() == b.size() ? 0 : 1;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    if (!torch::equal(a[i].view(torch::kInt), b[i].view(torch::kInt))) ++count;
  }
  return count;
}

int run() {
  lowtide::install();  // before CUDA is used
  const bool cuda = lowtide::installed_device() == "cuda";
  const torch::Device device(cuda ? torch::kCUDA : torch::kCPU);
  torch::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);

  const Result leaving = train(device, true);
  const Result staying = train(device, false);
  const std::size_t wrong = different(leaving.losses, staying.losses) + different(leaving.weights, staying.weights) +
                            different(leaving.state, staying.state);

  std::printf("%d steps on %s: %.1f MB of AdamW state left and came back after each\n", kSteps,
              cuda ? "the GPU" : "the host device", static_cast<double>(leaving.evicted) / 1e6);
  std::printf("%zu losses, %zu weights, %zu state tensors: %s\n", leaving.losses.size(), leaving.weights.size(),
              leaving.state.size(), wrong == 0 ? "bit-identical to the run in which it stayed" : "THEY DIFFER");
  if (leaving.evicted == 0) std::printf("nothing was evicted\n");
  return wrong == 0 && leaving.evicted > 0 && staying.evicted == 0 ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train: %s\n", error.what());
    return 2;
  }
}
