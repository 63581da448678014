#include "allocator/log.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include "allocator/logger.h"
#include "tests/support/log_capture.h"

namespace lowtide {
namespace {

/// Says one line of each level and leaves. For a process of its own: the level is read once.
[[noreturn]] void speak(const char* level) {
  if (level == nullptr) {
    unsetenv("LOWTIDE_LOG");
  } else {
    setenv("LOWTIDE_LOG", level, 1);
  }
  log(LogLevel::Debug, "a debug line");
  log(LogLevel::Info, "an info line");
  log(LogLevel::Warn, "a warn line");
  log(LogLevel::Error, "an error line");
  std::fputs("end", stderr);
  std::exit(0);
}

class LogDeathTest : public ::testing::Test {
 protected:
  // Runs each statement in a fresh process, where the log was not used yet.
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

TEST_F(LogDeathTest, SaysWarningsAndErrorsByDefault) {
  EXPECT_EXIT(speak(nullptr), ::testing::ExitedWithCode(0),
              "^[^\n]*\\[lowtide [0-9]+\\] warning: a warn line\n[^\n]* error: an error line\nend");
}

TEST_F(LogDeathTest, TakesTheLevelFromTheEnvironment) {
  EXPECT_EXIT(speak("debug"), ::testing::ExitedWithCode(0), "a debug line\n.*\n.*\n.*\nend");
  EXPECT_EXIT(speak("error"), ::testing::ExitedWithCode(0), "^[^\n]*an error line\nend");
  EXPECT_EXIT(speak("off"), ::testing::ExitedWithCode(0), "^end");
}

TEST_F(LogDeathTest, WarnsOnceOfAnUnknownLevelAndKeepsTheDefault) {
  EXPECT_EXIT(speak("loud"), ::testing::ExitedWithCode(0),
              "^[^\n]*LOWTIDE_LOG=loud[^\n]*using warn\n[^\n]*a warn line\n[^\n]*an error line\nend");
}

[[noreturn]] void log_from_an_exit_handler() {
  // Registered before the log is made, so it runs after the log would have been destroyed.
  std::atexit([] { log(LogLevel::Warn, "at exit"); });
  logger().set_level(spdlog::level::warn);
  std::exit(0);
}

TEST_F(LogDeathTest, IsUsableWhileTheProcessExits) {
  EXPECT_EXIT(log_from_an_exit_handler(), ::testing::ExitedWithCode(0), "at exit");
}

TEST(Log, IsOneLoggerForAll) {
  EXPECT_EQ(&logger(), &logger());
  EXPECT_EQ(logger().name(), "lowtide");
}

TEST(LogCapture, HearsOnlyWhileItLives) {
  log(LogLevel::Warn, "before");
  testing::LogCapture heard;
  log(LogLevel::Warn, "meanwhile {}", 7);
  EXPECT_NE(heard.text().find("meanwhile 7"), std::string::npos);
  EXPECT_EQ(heard.text().find("before"), std::string::npos);
}

}  // namespace
}  // namespace lowtide
