// Random sequences of arena operations against a model that is too simple to be wrong: one cell per 512 bytes.
// A failure prints the sequence as C++ to paste into a TEST of its own.
#include <gtest/gtest.h>

#include <algorithm>
#include <exception>
#include <map>
#include <ostream>
#include <random>
#include <sstream>
#include <string>
#include <variant>
#include <vector>

#include "allocator/arena.h"

namespace lowtide {
namespace {

constexpr Bytes kUnit = kBlockUnit;
constexpr std::size_t kUnitsPerPage = 4;
constexpr std::size_t kPages = 12;
constexpr std::size_t kUnits = kPages * kUnitsPerPage;
constexpr Bytes kPage = kUnitsPerPage * kUnit;

struct ModelBlock {
  std::size_t begin;
  std::size_t size;
  bool retired;
};

struct ModelPage {
  std::size_t begin;  // in pages
  std::size_t size;
  PageState state;
};

/// Blocks and pages as plain lists; everything else follows from them.
class Model {
 public:
  std::vector<ModelBlock> blocks;
  std::vector<ModelPage> pages;

  const ModelPage* page_behind(std::size_t unit) const {
    for (const ModelPage& page : pages) {
      if (unit / kUnitsPerPage >= page.begin && unit / kUnitsPerPage < page.begin + page.size) return &page;
    }
    return nullptr;
  }

  TileKind kind(std::size_t unit) const {
    for (const ModelBlock& block : blocks) {
      if (unit >= block.begin && unit < block.begin + block.size) {
        return block.retired ? TileKind::Retired : TileKind::Allocated;
      }
    }
    const ModelPage* page = page_behind(unit);
    if (page == nullptr) return TileKind::Vacant;
    return page->state == PageState::Resident ? TileKind::Free : TileKind::Withheld;
  }

  std::vector<TileKind> kinds() const {
    std::vector<TileKind> all;
    for (std::size_t unit = 0; unit < kUnits; ++unit) all.push_back(kind(unit));
    return all;
  }

  std::size_t count(const ModelPage& page, TileKind of) const {
    std::size_t units = 0;
    for (std::size_t i = 0; i < page.size * kUnitsPerPage; ++i) units += kind(page.begin * kUnitsPerPage + i) == of;
    return units;
  }

  /// Evicted pages without live bytes do not exist.
  void forget_empty() {
    std::erase_if(pages, [&](const ModelPage& page) {
      return page.state == PageState::Evicted && count(page, TileKind::Allocated) == 0;
    });
  }

  /// Start of the smallest run of Free units that holds `size`, the lowest of equals; kUnits if none does.
  std::size_t best_fit(std::size_t size) const {
    const auto all = kinds();
    std::size_t best = kUnits, best_size = kUnits + 1;
    for (std::size_t begin = 0; begin < kUnits;) {
      std::size_t end = begin;
      while (end < kUnits && all[end] == TileKind::Free) ++end;
      if (end - begin >= size && end - begin < best_size) best = begin, best_size = end - begin;
      begin = std::max(end, begin + 1);
    }
    return best;
  }

  /// Fewest pages, side by side, that make room for `size` units; 0 if no number does.
  std::size_t fewest_pages(std::size_t size) const {
    const auto all = kinds();
    for (std::size_t count = 1; count <= kPages; ++count) {
      for (std::size_t first = 0; first + count <= kPages; ++first) {
        std::vector<TileKind> grown = all;
        bool vacant = true;
        for (std::size_t unit = first * kUnitsPerPage; unit < (first + count) * kUnitsPerPage; ++unit) {
          vacant = vacant && all[unit] == TileKind::Vacant;
          grown[unit] = TileKind::Free;
        }
        std::size_t run = 0;
        for (std::size_t unit = 0; vacant && unit < kUnits; ++unit) {
          run = grown[unit] == TileKind::Free ? run + 1 : 0;
          if (run >= size) return count;
        }
      }
    }
    return 0;
  }
};

struct World {
  Arena arena{kUnits * kUnit, kPage};
  Model model;
  std::uint64_t last_handle = 0;

  /// The picked page among those in `state` that `allowed` accepts; null if there is none.
  template <class F>
  ModelPage* page(PageState state, std::size_t pick, F&& allowed) {
    std::vector<ModelPage*> found;
    for (ModelPage& page : model.pages) {
      if (page.state == state && allowed(page)) found.push_back(&page);
    }
    return found.empty() ? nullptr : found[pick % found.size()];
  }
  ModelPage* page(PageState state, std::size_t pick) {
    return page(state, pick, [](const ModelPage&) { return true; });
  }
  Page new_page(Bytes size) { return {PageHandle{++last_handle}, size}; }
};

Bytes at(const ModelPage& page) { return page.begin * kPage; }

struct Allocate {
  std::size_t units;
  void run(World& w) const {
    const auto got = w.arena.allocate(units * kUnit);
    const std::size_t expected = w.model.best_fit(units);
    if (expected == kUnits) {
      ASSERT_EQ(got, std::nullopt);
      return;
    }
    ASSERT_EQ(got, expected * kUnit);
    w.model.blocks.push_back({expected, units, false});
  }
};

struct Free {
  std::size_t pick;
  void run(World& w) const {
    if (w.model.blocks.empty()) return;
    const auto block = w.model.blocks.begin() + static_cast<std::ptrdiff_t>(pick % w.model.blocks.size());
    w.arena.free(block->begin * kUnit);
    w.model.blocks.erase(block);
    w.model.forget_empty();
  }
};

struct Retire {
  std::size_t pick;
  void run(World& w) const {
    if (w.model.blocks.empty()) return;
    ModelBlock& block = w.model.blocks[pick % w.model.blocks.size()];
    bool resident = true;
    for (std::size_t i = 0; i < block.size; ++i) {
      resident = resident && w.model.page_behind(block.begin + i)->state == PageState::Resident;
    }
    ASSERT_EQ(w.arena.is_resident(block.begin * kUnit), resident);
    if (block.retired || !resident) return;
    w.arena.retire(block.begin * kUnit);
    block.retired = true;
  }
};

/// Makes room for a block of `units` as the allocator would, with pages of one or, where they fit, of two units.
struct Grow {
  std::size_t units;
  std::size_t pages_each;
  void run(World& w) const {
    if (w.model.best_fit(units) != kUnits) return;
    const auto vacancy = w.arena.find_vacancy(units * kUnit);
    const std::size_t fewest = w.model.fewest_pages(units);
    ASSERT_EQ(vacancy.has_value(), fewest > 0);
    if (!vacancy) return;
    ASSERT_EQ(vacancy->needed, fewest * kPage);
    ASSERT_LE(vacancy->needed, vacancy->room);
    std::size_t covered = 0;
    while (covered < fewest) {
      const std::size_t each = (covered + pages_each) * kPage <= vacancy->room ? pages_each : 1;
      w.arena.attach(vacancy->offset + covered * kPage, w.new_page(each * kPage));
      w.model.pages.push_back({vacancy->offset / kPage + covered, each, PageState::Resident});
      covered += each;
    }
    ASSERT_NE(w.model.best_fit(units), kUnits) << "the vacancy did not make room";
  }
};

struct Withdraw {
  std::size_t pick;
  void run(World& w) const {
    ModelPage* page = w.page(PageState::Resident, pick, [&](const ModelPage& candidate) {
      return w.model.count(candidate, TileKind::Free) == candidate.size * kUnitsPerPage;
    });
    if (page == nullptr) return;
    const auto unused = w.arena.unused_pages();
    ASSERT_TRUE(std::ranges::find(unused, Extent{at(*page), page->size * kPage}) != unused.end());
    w.arena.withdraw(at(*page));
    page->state = PageState::Draining;
  }
};

struct Detach {
  std::size_t pick;
  void run(World& w) const {
    ModelPage* page = w.page(PageState::Draining, pick);
    if (page == nullptr) return;
    ASSERT_EQ(w.arena.detach(at(*page)).size, page->size * kPage);
    w.model.pages.erase(w.model.pages.begin() + (page - w.model.pages.data()));
  }
};

struct BeginEvict {
  std::size_t pick;
  void run(World& w) const {
    ModelPage* page = w.page(PageState::Resident, pick, [&](const ModelPage& candidate) {
      return w.model.count(candidate, TileKind::Retired) == 0;
    });
    if (page == nullptr) return;
    Bytes live = 0;
    for (const Extent& run : w.arena.live_runs(at(*page))) live += run.size;
    ASSERT_EQ(w.arena.begin_evict({at(*page)}), live);
    page->state = PageState::Evicting;
  }
};

struct FinishEvict {
  std::size_t pick;
  void run(World& w) const {
    ModelPage* page = w.page(PageState::Evicting, pick);
    if (page == nullptr) return;
    ASSERT_NE(w.arena.finish_evict(at(*page)).handle, PageHandle{});
    page->state = PageState::Evicted;
    w.model.forget_empty();
  }
};

struct BeginRestore {
  std::size_t pick;
  void run(World& w) const {
    ModelPage* page = w.page(PageState::Evicted, pick);
    if (page == nullptr) return;
    w.arena.begin_restore(at(*page));
    page->state = PageState::Restoring;
  }
};

struct FinishRestore {
  std::size_t pick;
  void run(World& w) const {
    ModelPage* page = w.page(PageState::Restoring, pick);
    if (page == nullptr) return;
    w.arena.finish_restore(at(*page), w.new_page(page->size * kPage));
    page->state = PageState::Resident;
  }
};

struct Cancel {
  PageState from;
  std::size_t pick;
  void run(World& w) const {
    ModelPage* page = w.page(from, pick);
    if (page == nullptr) return;
    w.arena.cancel(at(*page));
    page->state = from == PageState::Restoring ? PageState::Evicted : PageState::Resident;
    w.model.forget_empty();
  }
};

using Op = std::variant<Allocate, Free, Retire, Grow, Withdraw, Detach, BeginEvict, FinishEvict, BeginRestore,
                        FinishRestore, Cancel>;

std::ostream& operator<<(std::ostream& out, const Allocate& op) { return out << "Allocate{" << op.units << "}"; }
std::ostream& operator<<(std::ostream& out, const Free& op) { return out << "Free{" << op.pick << "}"; }
std::ostream& operator<<(std::ostream& out, const Retire& op) { return out << "Retire{" << op.pick << "}"; }
std::ostream& operator<<(std::ostream& out, const Grow& op) {
  return out << "Grow{" << op.units << ", " << op.pages_each << "}";
}
std::ostream& operator<<(std::ostream& out, const Withdraw& op) { return out << "Withdraw{" << op.pick << "}"; }
std::ostream& operator<<(std::ostream& out, const Detach& op) { return out << "Detach{" << op.pick << "}"; }
std::ostream& operator<<(std::ostream& out, const BeginEvict& op) { return out << "BeginEvict{" << op.pick << "}"; }
std::ostream& operator<<(std::ostream& out, const FinishEvict& op) { return out << "FinishEvict{" << op.pick << "}"; }
std::ostream& operator<<(std::ostream& out, const BeginRestore& op) { return out << "BeginRestore{" << op.pick << "}"; }
std::ostream& operator<<(std::ostream& out, const FinishRestore& op) {
  return out << "FinishRestore{" << op.pick << "}";
}
std::ostream& operator<<(std::ostream& out, const Cancel& op) {
  static const std::map<PageState, const char*> names{
      {PageState::Draining, "Draining"}, {PageState::Evicting, "Evicting"}, {PageState::Restoring, "Restoring"}};
  return out << "Cancel{PageState::" << names.at(op.from) << ", " << op.pick << "}";
}

void compare(const World& w) {
  w.arena.check();
  std::vector<TileKind> kinds;
  for (const Arena::Tile& tile : w.arena.tiles()) kinds.insert(kinds.end(), tile.size / kUnit, tile.kind);
  ASSERT_EQ(kinds, w.model.kinds());
  Bytes allocated = 0, retired = 0, evicted = 0, mapped = 0;
  for (const ModelBlock& block : w.model.blocks) (block.retired ? retired : allocated) += block.size * kUnit;
  for (const ModelPage& page : w.model.pages) {
    const bool away = page.state == PageState::Evicted || page.state == PageState::Restoring;
    if (away) {
      evicted += w.model.count(page, TileKind::Allocated) * kUnit;
    } else {
      mapped += page.size * kPage;
    }
    Bytes live = 0;
    for (const Extent& run : w.arena.live_runs(at(page))) live += run.size;
    ASSERT_EQ(live, w.model.count(page, TileKind::Allocated) * kUnit);
  }
  ASSERT_EQ(w.arena.allocated_bytes(), allocated);
  ASSERT_EQ(w.arena.retired_bytes(), retired);
  ASSERT_EQ(w.arena.evicted_bytes(), evicted);
  ASSERT_EQ(w.arena.mapped_bytes(), mapped);
  ASSERT_EQ(w.arena.empty(), w.model.pages.empty());
}

/// Runs `ops`; false at the first one after which arena and model differ. `done` counts those that ran.
bool replay(const std::vector<Op>& ops, std::size_t& done) {
  World world;
  for (done = 0; done < ops.size();) {
    try {
      std::visit([&](const auto& op) { op.run(world); }, ops[done++]);
      if (!::testing::Test::HasFailure()) compare(world);
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
    if (::testing::Test::HasFailure()) return false;
  }
  return true;
}

std::string as_code(const std::vector<Op>& ops, std::size_t count) {
  std::ostringstream out;
  for (std::size_t i = 0; i < count; ++i) {
    std::visit([&](const auto& op) { out << (i % 8 == 0 ? "\n    " : " ") << op << ","; }, ops[i]);
  }
  return out.str();
}

std::vector<Op> random_ops(std::uint32_t seed, std::size_t count) {
  std::mt19937 random(seed);
  const auto below = [&](std::size_t limit) { return static_cast<std::size_t>(random() % limit); };
  std::vector<Op> ops;
  while (ops.size() < count) {
    const std::size_t pick = below(64);
    switch (below(16)) {
      case 0:
      case 1:
      case 2:
      case 3:
        ops.push_back(Allocate{1 + below(below(4) == 0 ? 12 : 3)});
        break;
      case 4:
      case 5:
        ops.push_back(Free{pick});
        break;
      case 6:
        ops.push_back(Retire{pick});
        break;
      case 7:
        ops.push_back(Grow{1 + below(12), 1 + below(3)});
        break;
      case 8:
        ops.push_back(Withdraw{pick});
        break;
      case 9:
        ops.push_back(Detach{pick});
        break;
      case 10:
        ops.push_back(BeginEvict{pick});
        break;
      case 11:
        ops.push_back(FinishEvict{pick});
        break;
      case 12:
        ops.push_back(BeginRestore{pick});
        break;
      case 13:
        ops.push_back(FinishRestore{pick});
        break;
      case 14:
        ops.push_back(
            Cancel{std::vector{PageState::Draining, PageState::Evicting, PageState::Restoring}[below(3)], pick});
        break;
      default:
        ops.push_back(Free{pick});
        break;
    }
  }
  return ops;
}

TEST(ArenaOps, RandomSequencesMatchTheModel) {
  for (std::uint32_t seed = 1; seed <= 60; ++seed) {
    const auto ops = random_ops(seed, 400);
    std::size_t done = 0;
    if (!replay(ops, done)) {
      FAIL() << "seed " << seed << "; to replay:\n  std::size_t done = 0;\n  EXPECT_TRUE(replay({" << as_code(ops, done)
             << "\n  }, done));";
    }
  }
}

TEST(ArenaOps, RandomSequencesReachEveryKindOfTile) {
  // A generator that never gets anywhere would pass the test above.
  std::map<TileKind, int> seen;
  for (std::uint32_t seed = 1; seed <= 60; ++seed) {
    World world;
    for (const Op& op : random_ops(seed, 400)) {
      std::visit([&](const auto& one) { one.run(world); }, op);
      for (const Arena::Tile& tile : world.arena.tiles()) ++seen[tile.kind];
    }
  }
  for (const TileKind kind : {TileKind::Allocated, TileKind::Retired, TileKind::Free, TileKind::Withheld}) {
    EXPECT_GT(seen[kind], 1000) << static_cast<int>(kind);
  }
}

TEST(ArenaOps, APrintedSequenceIsOneThatCanBePasted) {
  const std::vector<Op> ops{Grow{5, 1}, Allocate{5}, BeginEvict{0}, Free{0}, Cancel{PageState::Evicting, 0}};
  EXPECT_EQ(as_code(ops, ops.size()),
            "\n    Grow{5, 1}, Allocate{5}, BeginEvict{0}, Free{0}, Cancel{PageState::Evicting, 0},");
  std::size_t done = 0;
  EXPECT_TRUE(replay(ops, done));
  EXPECT_EQ(done, ops.size());
}

}  // namespace
}  // namespace lowtide
