// What the plug-in tells the user: single lines on stderr, because the host's own log is not ours to write to.
#pragma once

#include <string>

namespace kvant::llama {

// Prints "kvant: <text>" as one line.
void say(const std::string& text);

// The same, but a text that was already printed is not printed again.
void say_once(const std::string& text);

}  // namespace kvant::llama
