#include "allocator/allocation_scope.h"

#include <algorithm>
#include <vector>

#include "allocator/errors.h"

namespace lowtide {
namespace {

// Separate from the stack, so that the allocator's question costs one load.
thread_local OwnerId innermost = kNoOwner;

std::vector<OwnerId>& scopes() {
  thread_local std::vector<OwnerId> stack;
  return stack;
}

}  // namespace

OwnerId current_owner() noexcept { return innermost; }

bool in_scope_of(OwnerId owner) noexcept { return std::ranges::find(scopes(), owner) != scopes().end(); }

void enter_scope(OwnerId owner) {
  scopes().push_back(owner);
  innermost = owner;
}

void leave_scope(OwnerId owner) {
  auto& stack = scopes();
  if (stack.empty() || stack.back() != owner) {
    throw Misuse(
        "an offload region is left on a thread, or in an order, in which it was not entered: scopes nest, and end on "
        "the thread that began them");
  }
  stack.pop_back();
  innermost = stack.empty() ? kNoOwner : stack.back();
}

}  // namespace lowtide
