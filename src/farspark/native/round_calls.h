/* round_calls: what a round does in a channel, as calls of Python that cost little. Nothing here decides anything: each call is the
 * quick form of something that Python has, too, and whatever is out of the ordinary it leaves as it found it, for Python to judge.
 *
 * The functions are Python's, so they are not listed here; roundcalls_functions returns them by name, and native/round_calls.py says what
 * each takes. Written for Python's limited API of 3.11: one build serves every later Python.
 */
#ifndef FARSPARK_ROUND_CALLS_H
#define FARSPARK_ROUND_CALLS_H

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030b0000
#endif
#include <Python.h>
#include <stdint.h>

#define ROUNDCALLS_API __attribute__((visibility("default")))

/* Of the functions together: any change of them is another version. */
#define ROUNDCALLS_VERSION 2u
#define ROUNDCALLS_NEVER INT64_MAX

ROUNDCALLS_API uint32_t roundcalls_version(void);
/* SHA-256 of the sources in hex, "" for a build that does not say. */
ROUNDCALLS_API const char *roundcalls_build(void);
/* A new dict of functions by name; with the GIL held. */
ROUNDCALLS_API PyObject *roundcalls_functions(void);

/* Of step_calls.c; ends with NULL. */
extern PyMethodDef roundcalls_of_steps[];
int roundcalls_prepare_steps(void);

#endif
