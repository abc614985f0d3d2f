"""A program that fails on purpose: run `python broken.py code`, and then `stoker explain c-0`.

The argument selects the failure:

code      multiply two matrices of incompatible shapes
data      read a file that does not exist
package   import a module that is not installed on the pilot's node
memory    use more memory than the context declares
time      run a call that hangs
disk      read a file that the kernel cannot read, as with a failed disk or file server; three tries in a minute
"""

import sys
import time

import stoker


@stoker.context(memory="300 MB")
def matrix():
    import numpy

    return numpy.eye(4)


def answer(matrix, how):
    import numpy

    print(f"multiplying, {how}")
    if how == "code":
        return float((matrix @ numpy.ones(5)).sum())
    if how == "data":
        return float((matrix @ numpy.load("claims.npy")).sum())
    if how == "package":
        import claim_reader

        return claim_reader.read(matrix)
    if how == "memory":
        return float(sum(part.sum() for part in [numpy.ones(10_000_000) for _ in range(40)]))
    if how == "time":
        time.sleep(600)
    if how == "disk":
        with open("/proc/self/mem", "rb") as weights:
            return len(weights.read(1))
    return float(matrix.sum())


if __name__ == "__main__":
    with stoker.load():
        print(stoker.app(answer, context=matrix(), timeout=5)(*sys.argv[1:2]).result())
