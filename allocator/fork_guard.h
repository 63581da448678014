// Notices that the process was forked. Threads, held locks and driver contexts of the parent do not exist or do not
// work in the child, so whoever depends on them refuses there instead of hanging.
#pragma once

namespace lowtide {

/// Remembers the process that made it. Safe from any thread; costs one relaxed load to ask.
class ForkGuard {
 public:
  ForkGuard();

  /// True in a child that fork() made after this object.
  bool in_child() const noexcept;
  /// Throws Misuse in such a child. Call it before taking any lock: the parent may have held it while it forked.
  void check() const;

 private:
  unsigned forks_;
};

}  // namespace lowtide
