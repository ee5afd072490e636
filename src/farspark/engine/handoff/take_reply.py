"""The kernel that takes a round's reply out of host memory and acknowledges it, as text that the driver itself compiles.

A copy and a write of a value would do the same; but a copy is another engine's work, and a stream that goes from one engine of
the device to another stands still for some microseconds each time.
"""

from __future__ import annotations

from typing import Final

NAME: Final = b"farspark_take_reply"

# Parameters and the number of threads are hostflag.h's (HOSTFLAG_TAKE_REPLY_THREADS). Each thread has four loads on their way at
# once: the bus answers all of them in the time of one.
#
# The loads are of the system's scope, which no cache of the device's may answer with what an earlier round left there. The
# barrier orders the loads of all threads before the store of the first one, whose release makes that order hold for the CPU: it
# fills the reply anew only once it has seen this round's number, or that of a later one, in `consumed` or `gathered`.
PTX: Final = b"""
.version 7.0
.target sm_70
.address_size 64

.visible .entry farspark_take_reply(
    .param .u64 reply, .param .u64 result, .param .u32 words, .param .u64 consumed, .param .u32 round)
{
    .reg .pred %first, %in0, %in1, %in2, %in3;
    .reg .b32 %i0, %i1, %i2, %i3, %n, %words, %v0, %v1, %v2, %v3, %round;
    .reg .b64 %reply, %result, %consumed, %from, %to;

    ld.param.u64 %reply, [reply];
    ld.param.u64 %result, [result];
    ld.param.u32 %words, [words];
    mov.u32 %i0, %tid.x;
    mov.u32 %n, %ntid.x;

more:
    add.u32 %i1, %i0, %n;
    add.u32 %i2, %i1, %n;
    add.u32 %i3, %i2, %n;
    setp.lt.u32 %in0, %i0, %words;
    setp.lt.u32 %in1, %i1, %words;
    setp.lt.u32 %in2, %i2, %words;
    setp.lt.u32 %in3, %i3, %words;
    mad.wide.u32 %from, %i0, 4, %reply;
@%in0 ld.relaxed.sys.global.u32 %v0, [%from];
    mad.wide.u32 %from, %i1, 4, %reply;
@%in1 ld.relaxed.sys.global.u32 %v1, [%from];
    mad.wide.u32 %from, %i2, 4, %reply;
@%in2 ld.relaxed.sys.global.u32 %v2, [%from];
    mad.wide.u32 %from, %i3, 4, %reply;
@%in3 ld.relaxed.sys.global.u32 %v3, [%from];
    mad.wide.u32 %to, %i0, 4, %result;
@%in0 st.global.u32 [%to], %v0;
    mad.wide.u32 %to, %i1, 4, %result;
@%in1 st.global.u32 [%to], %v1;
    mad.wide.u32 %to, %i2, 4, %result;
@%in2 st.global.u32 [%to], %v2;
    mad.wide.u32 %to, %i3, 4, %result;
@%in3 st.global.u32 [%to], %v3;
    add.u32 %i0, %i3, %n;
    setp.lt.u32 %in0, %i0, %words;
@%in0 bra more;

    bar.sync 0;
    mov.u32 %i0, %tid.x;
    setp.eq.u32 %first, %i0, 0;
    ld.param.u64 %consumed, [consumed];
    ld.param.u32 %round, [round];
@%first st.release.sys.global.u32 [%consumed], %round;
    ret;
}
\x00"""
