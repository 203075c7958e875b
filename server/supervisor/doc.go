// Package supervisor runs the plugin processes of the bridge.
//
// A [Supervisor] follows one registry: it starts and configures the plugin,
// passes its stream to a [Sink], and restarts it when it exits, hangs, or
// breaks the contract. A plugin failure removes nothing: the sink retains its
// resources until a new process has sent a full listing.
//
// # The life of a process
//
// The steps are start, handshake, Describe, Configure and Watch; then batches
// follow until the stream ends. Each step before Watch has a time limit, and
// the status shows the pending step. [Supervisor.Prepare] runs the steps up to
// Watch, so that a refused configuration is reported before any registry is
// followed. A plugin hangs if its stream is silent for 15 seconds. Each batch
// is applied before the next is read, so flow control slows a plugin that
// floods. When the stream ends, the process group is ended too: SIGTERM, then
// SIGKILL after a bounded time.
//
// A process that ended is restarted after a jittered back-off of 200 ms to 30
// s, which is reset once a process was healthy for a minute. After a refused
// configuration the pause is a minute: only a change of a file or an
// environment variable that the configuration refers to can help.
//
// # Host
//
// All plugins of a bridge share a [Host]: the directory of their sockets, and
// the thread that starts them. On Linux a plugin receives SIGKILL when that
// thread ends, which it does with the bridge in every case.
package supervisor
