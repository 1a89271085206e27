# Flags of every kvant target. FMA contraction is off so that encoders give the same bytes on every instruction set.
function(kvant_flags target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Werror -ffp-contract=off)
  if(KVANT_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${KVANT_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
    target_link_options(${target} PRIVATE -fsanitize=${KVANT_SANITIZE})
  endif()
endfunction()
