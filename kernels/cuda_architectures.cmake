# Sets CMAKE_CUDA_ARCHITECTURES to those of these that this nvcc compiles for. Each is built as machine code and as PTX:
# cards in between run the code of the one below, and cards newer than the last compile its PTX in their driver.
# nvcc 13 has nothing below 75; nvcc 12 has 60 (P100, and 6.1) and 70 (V100), and 100 and 120 from 12.8 on.
execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" --list-gpu-arch
                OUTPUT_VARIABLE known COMMAND_ERROR_IS_FATAL ANY)
set(CMAKE_CUDA_ARCHITECTURES "")
foreach(architecture 60 70 75 80 90 100 120)
  if(known MATCHES "compute_${architecture}[^0-9]")
    list(APPEND CMAKE_CUDA_ARCHITECTURES ${architecture})
  endif()
endforeach()
