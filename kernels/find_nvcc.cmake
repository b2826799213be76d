# Sets CMAKE_CUDA_COMPILER where nvcc is not on PATH: toolkits install it elsewhere and leave PATH to their users.
# Order: what the user chose (CMAKE_CUDA_COMPILER, CUDACXX), CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda.
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(ATOLL_NVCC nvcc
               HINTS "$ENV{CUDA_HOME}/bin" "$ENV{CUDA_PATH}/bin"
               PATHS /usr/local/cuda/bin /opt/cuda/bin)
  if(ATOLL_NVCC)
    set(CMAKE_CUDA_COMPILER "${ATOLL_NVCC}")
  endif()
endif()
