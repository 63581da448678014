#!/usr/bin/env bash
# Runs a command without address space randomisation where the system allows that: ThreadSanitizer of older compilers stops with
# "unexpected memory mapping" on kernels that randomise more bits than it knows.
if setarch "$(uname -m)" -R true 2> /dev/null; then
  exec setarch "$(uname -m)" -R "$@"
fi
exec "$@"
