// Package supervisor runs the plugin processes of the bridge.
//
// One [Supervisor] follows one registry: it starts the registry's plugin, gives it its configuration, hands what it streams to a
// [Sink], and starts it again when it ends, hangs, or breaks the contract. Nothing that a plugin does or fails to do removes anything:
// the sink keeps what it has until a new process has sent a full listing.
//
// # The life of a process
//
// start, handshake, Describe, Configure, Watch; then batches until the stream ends. Each of the steps before Watch has a time limit, and
// what is waited for shows in the status. [Supervisor.Prepare] takes the first process up to Watch, so that a configuration that the plugin refuses is
// known before anything is followed. A silence of 15 seconds on the stream means that the plugin hangs. A batch is applied before the next one is read, so a plugin that floods is
// slowed down by flow control instead of filling memory. Whatever ends the stream, the process is ended too: SIGTERM, then
// SIGKILL after a bounded time, to the whole process group.
//
// A process that ended is started again after a jittered back-off of 200 ms to 30 s, which begins anew when the process was healthy for a
// minute. A configuration that the plugin refuses does not mend itself: then the next attempt is made after a minute, in case a file
// or an environment that the configuration refers to has changed.
//
// # Host
//
// All plugins of one bridge share a [Host]: the directory of their sockets, and the thread that starts them. On Linux
// a plugin gets SIGKILL when that thread ends, which is when the bridge does, however it ends.
package supervisor
