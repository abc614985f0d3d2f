"""A program as a newcomer writes it, to be broken: `python broken.py code`, and then `stoker explain c-0`.

code      two matrices that do not fit
data      a file that is not there
package   a module that is not installed where pilots run
memory    more memory than the context declares
time      a call that hangs
disk      a file that the kernel cannot read, as when its disk or its file server fails; tried three times in a minute
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
