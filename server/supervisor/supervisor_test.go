package supervisor_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"
	mcp "istio.io/api/mcp/v1alpha1"

	"github.com/isthmus-mesh/isthmus/internal/testwait"
	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/supervisor"
)

// sink records what it is handed.
type sink struct {
	begun chan struct{} // one for each Begin
	down  chan error
	slow  chan struct{} // if set, Apply takes one from it
	fail  error         // what Apply returns
	keep  int           // how many messages are kept

	mu sync.Mutex
	// guarded by mu
	names     map[string]bool
	mentioned map[string]bool
	synced    int
	messages  []*pluginv1.WatchResponse
	changed   chan struct{} // closed at the next change
}

func newSink() *sink {
	return &sink{
		begun: make(chan struct{}, 1000), down: make(chan error, 1000), keep: 100,
		names: map[string]bool{}, mentioned: map[string]bool{}, changed: make(chan struct{}),
	}
}

func (s *sink) Begin(supervisor.Description) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mentioned = map[string]bool{}
	s.begun <- struct{}{}
}

func (s *sink) Down(err error) { s.down <- err }

func (s *sink) Apply(resp *pluginv1.WatchResponse) error {
	if s.slow != nil {
		<-s.slow
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range resp.GetRemovals() {
		delete(s.names, r.GetCollection()+" "+r.GetName())
	}
	for _, u := range resp.GetUpserts() {
		var res mcp.Resource
		if proto.Unmarshal(u.GetResource(), &res) == nil {
			name := collection.OfBody(res.GetBody().GetTypeUrl()) + " " + res.GetMetadata().GetName()
			s.names[name], s.mentioned[name] = true, true
		}
	}
	if resp.GetSynced() {
		s.synced++
		maps.DeleteFunc(s.names, func(name string, _ bool) bool { return !s.mentioned[name] })
	}
	s.messages = append(s.messages, resp)
	if len(s.messages) > s.keep {
		s.messages = s.messages[1:]
	}
	close(s.changed)
	s.changed = make(chan struct{})
	return s.fail
}

// deadline is how long a test waits for something that will happen.
const deadline = time.Minute

// until waits until the sink is as a test wants it.
func (s *sink) until(t testing.TB, what string, ok func(s *sink) bool) {
	t.Helper()
	timer := time.NewTimer(deadline)
	defer timer.Stop()
	for {
		s.mu.Lock()
		changed, done := s.changed, ok(s)
		s.mu.Unlock()
		if done {
			return
		}
		select {
		case <-changed:
		case <-timer.C:
			t.Fatalf("not in time: %s", what)
		}
	}
}

func (s *sink) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.names)
}

func wait[T any](t testing.TB, what string, c <-chan T) T {
	t.Helper()
	return testwait.Receive(t, deadline, what, c)
}

// eventually asks again and again: for what only the operating system knows.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	testwait.Eventually(t, deadline, what, func() (string, bool) { return "it is not so", ok() })
}

// shortDir returns a directory with a short path, for sockets.
func shortDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "it")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func newHost(t testing.TB) *supervisor.Host {
	t.Helper()
	h, err := supervisor.NewHost(shortDir(t), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if entries, err := os.ReadDir(h.Dir()); err != nil || len(entries) != 1 {
			t.Errorf("left in the host's directory: %v, %v", entries, err) // all but the lock
		}
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	})
	return h
}

// buffer is the log of a supervisor.
type buffer = testwait.Buffer

// start runs a supervisor until the test ends.
func start(t testing.TB, h *supervisor.Host, sp supervisor.Spec, s *sink) (*supervisor.Supervisor, *buffer) {
	t.Helper()
	logs := &buffer{}
	log := slog.New(slog.NewTextHandler(logs, nil)).With(slog.String("registry", sp.Registry))
	sup, err := supervisor.New(h, sp, s, log, supervisor.NewMetrics(prometheus.NewRegistry()))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- sup.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := wait(t, "end of the supervisor", done); err != nil {
			t.Error(err)
		}
		if st := sup.Status(); st.Phase != supervisor.PhaseStopped || st.PID != 0 {
			t.Errorf("status after the end: %+v", st)
		}
		if t.Failed() {
			text := logs.String()
			t.Logf("log, its end:\n%s", text[max(0, len(text)-4000):])
		}
	})
	return sup, logs
}

// A plugin that is killed is started again; nothing is removed meanwhile, and
// what the new one does not mention goes when it is synced.
func TestPluginKilled(t *testing.T) {
	t.Parallel()
	h, s := newHost(t), newSink()
	socket := filepath.Join(shortDir(t), "s")
	sup, _ := start(t, h, spec("remote", remoteConfig{Socket: socket}), s)
	wait(t, "first stream", s.begun)
	tell(t, socket, command{Op: "set", Name: "web", Instances: 3}, command{Op: "set", Name: "api", Instances: 2}, command{Op: "synced"})
	s.until(t, "first listing", func(s *sink) bool { return s.synced == 1 && len(s.names) == 7 })
	eventually(t, "phase live", func() bool { return sup.Status().Phase == supervisor.PhaseLive })
	if st := sup.Status(); st.Services != 2 || st.Instances != 5 || st.Adapter != "remote" || st.Version != "1.2.3" {
		t.Errorf("status %+v", st)
	}

	pid := sup.Status().PID
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := wait(t, "report of the death", s.down); !errors.Is(err, supervisor.ErrExited) || !strings.Contains(err.Error(), "killed") {
		t.Errorf("down: %v", err)
	}
	wait(t, "second stream", s.begun)
	if n := s.count(); n != 7 {
		t.Errorf("%d resources after the restart, want 7", n)
	}
	st := sup.Status()
	if st.PID == pid || st.Restarts != 1 || !strings.Contains(st.LastError, "killed") {
		t.Errorf("status after the restart: %+v", st)
	}
	tell(t, socket, command{Op: "set", Name: "web", Instances: 3})
	s.until(t, "web again", func(s *sink) bool { return s.mentioned[collection.ServiceEntry+" test/web"] })
	if n := s.count(); n != 7 {
		t.Errorf("%d resources before the second listing is complete, want 7", n)
	}
	tell(t, socket, command{Op: "synced"})
	s.until(t, "second listing", func(s *sink) bool { return s.synced == 2 && len(s.names) == 4 })
}

// One changed instance of a service with 1000 crosses the wire as one small
// message.
func TestOneChangeIsOneSmallMessage(t *testing.T) {
	t.Parallel()
	h, s := newHost(t), newSink()
	socket := filepath.Join(shortDir(t), "s")
	start(t, h, spec("remote", remoteConfig{Socket: socket}), s)
	wait(t, "stream", s.begun)
	tell(t, socket, command{Op: "set", Name: "web", Instances: 1000}, command{Op: "synced"})
	s.until(t, "first listing", func(s *sink) bool { return s.synced == 1 && len(s.names) == 1001 })
	s.mu.Lock()
	s.messages = nil
	s.mu.Unlock()
	tell(t, socket, command{Op: "set", Name: "web", Instances: 1000, Change: 500})
	s.until(t, "change", func(s *sink) bool { return len(s.messages) > 0 })
	m := s.messages[0]
	if n, size := len(m.GetUpserts()), proto.Size(m); n != 1 || len(m.GetRemovals()) != 0 || size > 400 {
		t.Errorf("%d upserts, %d removals, %d bytes; want 1, 0, at most 400", n, len(m.GetRemovals()), size)
	}
}

// What the registry's state is shows in the phase.
func TestPhases(t *testing.T) {
	t.Parallel()
	h, s := newHost(t), newSink()
	socket := filepath.Join(shortDir(t), "s")
	sup, logs := start(t, h, spec("remote", remoteConfig{Socket: socket}), s)
	wait(t, "stream", s.begun)
	eventually(t, "syncing", func() bool { return sup.Status().Phase == supervisor.PhaseSyncing })
	tell(t, socket, command{Op: "degraded", Name: "no route"})
	eventually(t, "degraded", func() bool { return sup.Status().Phase == supervisor.PhaseDegraded })
	first := sup.Status()
	if first.LastError != "no route" || first.LastErrorAt.IsZero() {
		t.Errorf("last error %q at %v", first.LastError, first.LastErrorAt)
	}
	tell(t, socket, command{Op: "followed"})
	eventually(t, "syncing again", func() bool { return sup.Status().Phase == supervisor.PhaseSyncing })
	tell(t, socket, command{Op: "synced"})
	eventually(t, "live", func() bool { return sup.Status().Phase == supervisor.PhaseLive })
	tell(t, socket, command{Op: "degraded", Name: "no route"})
	eventually(t, "degraded again", func() bool { return sup.Status().Phase == supervisor.PhaseDegraded })
	if again := sup.Status(); !again.LastErrorAt.After(first.LastErrorAt) {
		t.Errorf("the same error again is of %v, the first was of %v", again.LastErrorAt, first.LastErrorAt)
	}
	if out := logs.String(); !strings.Contains(out, `msg="plugin started" registry=test adapter=remote version=1.2.3`) {
		t.Errorf("log:\n%s", out)
	}
}

// Whatever makes the adapter fail, the plugin is restarted with the reason
// shown.
func TestAdapterFails(t *testing.T) {
	t.Parallel()
	for op, want := range map[string]string{
		"fail":  "the adapter ended: out of order",
		"panic": "the adapter panicked: out of order",
		"crash": "panic: out of order",
	} {
		t.Run(op, func(t *testing.T) {
			t.Parallel()
			h, s := newHost(t), newSink()
			h.Hurry()
			socket := filepath.Join(shortDir(t), "s")
			_, logs := start(t, h, spec("remote", remoteConfig{Socket: socket}), s)
			wait(t, "stream", s.begun)
			tell(t, socket, command{Op: "set", Name: "web", Instances: 1}, command{Op: "synced"})
			eventually(t, "the first listing", func() bool { return s.count() == 2 })
			tell(t, socket, command{Op: op, Name: "out of order"})
			if err := wait(t, "report", s.down); !strings.Contains(err.Error(), want) {
				t.Errorf("down: %v", err)
			}
			wait(t, "second stream", s.begun)
			if n := s.count(); n != 2 {
				t.Errorf("%d resources, want 2", n)
			}
			if op != "fail" && !strings.Contains(logs.String(), "goroutine ") {
				t.Errorf("no stack in the log:\n%s", logs)
			}
		})
	}
}

// A plugin that takes memory without end is ended by its bound, restarted, and
// the reason shown with the cure.
func TestMemoryBound(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("the bound is Linux's")
	}
	h, s := newHost(t), newSink()
	h.Hurry()
	socket := filepath.Join(shortDir(t), "s")
	sp := spec("remote", remoteConfig{Socket: socket})
	sp.Memory = 1 << 30
	start(t, h, sp, s)
	wait(t, "stream", s.begun)
	tell(t, socket, command{Op: "set", Name: "web", Instances: 1}, command{Op: "synced"})
	eventually(t, "the first listing", func() bool { return s.count() == 2 })
	tell(t, socket, command{Op: "eat"})
	if err := wait(t, "report", s.down); !strings.Contains(err.Error(), "limits.plugin_memory allows 1073741824 bytes") {
		t.Errorf("down: %v", err)
	}
	wait(t, "second stream", s.begun)
	if n := s.count(); n != 2 {
		t.Errorf("%d resources, want 2", n)
	}
}

// A plugin that breaks the contract is ended, restarted, and the reason shown.
func TestRogues(t *testing.T) {
	t.Parallel()
	for role, want := range map[string]string{
		"silent":         "the plugin hangs: it sent no sign of life: no handshake on its standard output within 8s; is this an adapter",
		"flood-stderr":   "the plugin hangs: it sent no sign of life: no handshake on its standard output within 8s; its last words: noise",
		"flood-stdout":   `the first line on its standard output, "noise`,
		"junk":           "this is not a handshake",
		"exits":          "exit status 3; its last words: cannot go on",
		"hang-describe":  "hangs",
		"hang-configure": "hangs",
		"hang-watch":     "hangs",
		"bad-name":       "../../etc",
		"bad-schema":     "config_schema is not JSON",
		"bad-collection": "core/Secret",
		"garbage":        "broke the contract",
		"huge":           "larger than 16 MiB",
		"ends":           "ended the stream",
		"synced-twice":   "synced twice",
	} {
		t.Run(role, func(t *testing.T) {
			t.Parallel()
			h, s := newHost(t), newSink()
			if h.Hurry(); strings.Contains(want, "hangs") {
				h.HurryHung()
			}
			sup, _ := start(t, h, spec(role, struct{}{}), s)
			for i := range 2 {
				if err := wait(t, "report", s.down); !strings.Contains(err.Error(), want) {
					t.Errorf("down %d: %v", i, err)
				}
			}
			if st := sup.Status(); st.LastError == "" || st.LastErrorAt.IsZero() {
				t.Errorf("status %+v", st)
			}
		})
	}
}

// A plugin that does not end when it is asked to is killed.
func TestStubbornPlugin(t *testing.T) {
	t.Parallel()
	h, s := newHost(t), newSink()
	h.Hurry()
	sup, err := supervisor.New(h, spec("stubborn", struct{}{}), s, slog.New(slog.DiscardHandler), nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- sup.Run(ctx) }()
	s.until(t, "synced", func(s *sink) bool { return s.synced == 1 })
	pid := sup.Status().PID
	if !testwait.Running(pid) {
		t.Error("the plugin is gone before its time")
	}
	cancel()
	if err := wait(t, "end of the supervisor", done); err != nil {
		t.Error(err)
	}
	if testwait.Running(pid) {
		t.Error("the plugin is still there")
	}
}

// A flooding plugin is slowed down: it has no more under way than the
// transport's windows hold, and what it costs is bounded. It runs alone, so
// that the memory is its own.
func TestFloodIsBounded(t *testing.T) {
	const (
		taken = 300
		most  = 32 << 20 // gRPC lets a stream's window grow to 16 MiB; both ends have some messages in their hands
	)
	h, s := newHost(t), newSink()
	s.slow = make(chan struct{})
	s.keep = 1
	count := filepath.Join(t.TempDir(), "sent")
	sp := spec("flood", struct{}{})
	sp.Env = append(sp.Env, floodKey+"="+count)
	sup, _ := start(t, h, sp, s)
	wait(t, "stream", s.begun)
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	for i := range taken {
		select {
		case s.slow <- struct{}{}:
		case err := <-s.down:
			t.Fatal(err)
		}
		if i%50 != 49 {
			continue
		}
		if now := heap(); now > before+most {
			t.Errorf("the heap grew by %d MiB after %d messages", (now-before)>>20, i+1)
		}
		b, err := os.ReadFile(count)
		if err != nil {
			t.Fatal(err)
		}
		if sent := binary.BigEndian.Uint64(b); (sent-uint64(i+1))*floodMessage > most {
			t.Errorf("%d messages were sent, %d were taken: %d MiB are under way", sent, i+1, (sent-uint64(i+1))*floodMessage>>20)
		}
	}
	if st := sup.Status(); st.Restarts != 0 || st.Phase != supervisor.PhaseSyncing {
		t.Errorf("status %+v", st)
	}
	close(s.slow)
}

// droppedLines finds the counts of lines that were not logged.
var droppedLines = regexp.MustCompile(`msg="the plugin logs too much; the rest was left out" registry=test lines=(\d+)`)

// A plugin's log lines are bounded, those that are dropped are counted, and
// none of them can do harm.
func TestChattyPlugin(t *testing.T) {
	t.Parallel()
	h, s := newHost(t), newSink()
	logs := &buffer{}
	sup, err := supervisor.New(h, spec("chatty", struct{}{}), s, slog.New(slog.NewTextHandler(logs, nil)).With(slog.String("registry", "test")), nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- sup.Run(ctx) }() // ends with cancel
	s.until(t, "synced", func(s *sink) bool { return s.synced == 1 })
	cancel()
	if err := wait(t, "end of the supervisor", done); err != nil {
		t.Error(err)
	}
	text := logs.String()
	logged, dropped, windows := strings.Count(text, "msg=\"noise "), 0, 0
	for _, m := range droppedLines.FindAllStringSubmatch(text, -1) {
		n, err := strconv.Atoi(m[1])
		if err != nil {
			t.Fatal(err)
		}
		dropped += n
		windows++
	}
	// The two odd lines are logged or counted like the others; of the long one
	// only the beginning is.
	for _, odd := range []string{`msg="{\"@message\":5`, "msg=xxx"} {
		logged += strings.Count(text, odd)
	}
	if want := chattyLines + 2; logged+dropped != want {
		t.Errorf("%d lines were logged and %d dropped, want %d together", logged, dropped, want)
	}
	if windows == 0 || logged > (windows+1)*supervisor.MaxLines {
		t.Errorf("%d lines were logged in %d windows", logged, windows+1)
	}
	for line := range strings.Lines(text) {
		if len(line) > supervisor.MaxLine+200 {
			t.Errorf("a line of %d bytes", len(line))
		}
	}
}

// A second takes so many bytes at most, whatever the number of lines, and a
// line so many, whatever its length; what is left out is counted.
func TestLogBytes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		logs := &buffer{}
		r, w := io.Pipe()
		ended := make(chan struct{})
		go func() { // ends with w
			defer close(ended)
			supervisor.CopyLog(slog.New(slog.NewTextHandler(logs, nil)), r)
		}()
		const lines, length = 1000, 60_000
		for _, c := range []string{"x", "\x00", "é"} { // a zero takes four bytes in the log
			logs.Reset()
			line := strings.Repeat(c, length) + "\n"
			if _, err := io.WriteString(w, strings.Repeat(line, lines)); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			if got := len(logs.String()); got < supervisor.MaxLine || got > supervisor.MaxBytes+4*supervisor.MaxLine {
				t.Errorf("%d lines of %d times %q: %d bytes were logged", lines, length, c, got)
			}
			<-time.After(time.Second)
			logs.Reset()
			if _, err := io.WriteString(w, "done\n"); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			m := regexp.MustCompile(`the rest was left out" lines=(\d+) bytes=(\d+)`).FindStringSubmatch(logs.String())
			if m == nil {
				t.Fatalf("%q: nothing is said of what was left out:\n%s", c, logs)
			}
			dropped, _ := strconv.Atoi(m[1])
			lost, _ := strconv.Atoi(m[2])
			if most := lines - supervisor.MaxBytes/supervisor.MaxLine; dropped < most || dropped >= lines || lost < dropped*length*len(c)-supervisor.MaxLine || lost >= lines*length*len(c) {
				t.Errorf("%q: %d lines and %d bytes were left out", c, dropped, lost)
			}
			<-time.After(time.Second)
		}
		_ = w.Close()
		<-ended
	})
}

// Of the lines of one second as many as the bound are logged; the others are
// counted, once, when the next second has a line or the output ends.
func TestLogBound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		logs := &buffer{}
		r, w := io.Pipe()
		ended := make(chan struct{})
		go func() { // ends with w
			defer close(ended)
			supervisor.CopyLog(slog.New(slog.NewTextHandler(logs, nil)).With(slog.String("registry", "test")), r)
		}()
		say := func(n int) {
			t.Helper()
			if _, err := io.WriteString(w, strings.Repeat("noise\n", n)); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		check := func(when string, lines int, dropped ...string) {
			t.Helper()
			text := logs.String()
			var got []string
			for _, m := range droppedLines.FindAllStringSubmatch(text, -1) {
				got = append(got, m[1])
			}
			if n := strings.Count(text, "msg=noise"); n != lines || !slices.Equal(got, dropped) {
				t.Errorf("%s: %d lines were logged, want %d; dropped %v, want %v", when, n, lines, got, dropped)
			}
		}
		say(100 * supervisor.MaxLines)
		check("in the first second", supervisor.MaxLines)
		<-time.After(time.Second)
		say(1)
		check("in the second one", supervisor.MaxLines+1, fmt.Sprint(99*supervisor.MaxLines))
		say(supervisor.MaxLines + 6)
		_ = w.Close()
		<-ended
		check("at the end", 2*supervisor.MaxLines, fmt.Sprint(99*supervisor.MaxLines), "7")
	})
}

// When the registry was last heard from is what the adapter says, not that its
// process lives; it outlives the process, and nothing of it reaches the sink.
func TestLastHeard(t *testing.T) {
	t.Parallel()
	h, s := newHost(t), newSink()
	socket := filepath.Join(shortDir(t), "s")
	sup, _ := start(t, h, spec("remote", remoteConfig{Socket: socket}), s)
	wait(t, "stream", s.begun)
	begun := time.Now()
	tell(t, socket, command{Op: "set", Name: "web", Instances: 1})
	s.until(t, "the service", func(s *sink) bool { return len(s.messages) > 0 })
	if at := sup.Status().LastHeard; !at.IsZero() {
		t.Errorf("heard at %v although it was not told", at)
	}
	tell(t, socket, command{Op: "heard"})
	eventually(t, "heard", func() bool { return !sup.Status().LastHeard.IsZero() })
	heard := sup.Status()
	if at := heard.LastHeard; at.Before(begun) || at.After(time.Now()) {
		t.Errorf("heard at %v", at)
	}
	eventually(t, "another sign of life", func() bool { return sup.Status().LastMessage.After(heard.LastMessage) })
	if at := sup.Status().LastHeard; !at.Equal(heard.LastHeard) {
		t.Errorf("a sign of life moved it from %v to %v", heard.LastHeard, at)
	}
	tell(t, socket, command{Op: "fail", Name: "enough"})
	wait(t, "end", s.down)
	wait(t, "next stream", s.begun)
	if at := sup.Status().LastHeard; !at.Equal(heard.LastHeard) {
		t.Errorf("the end of the process moved it from %v to %v", heard.LastHeard, at)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, m := range s.messages {
		if m.GetLastHeard() != nil || proto.Size(m) == 0 {
			t.Errorf("the sink got %v", m)
		}
	}
}

// Times that cannot be are no times.
func TestLastHeardOdd(t *testing.T) {
	t.Parallel()
	h, s := newHost(t), newSink()
	sup, _ := start(t, h, spec("odd-times", struct{}{}), s)
	s.until(t, "synced", func(s *sink) bool { return s.synced == 1 })
	if at := sup.Status().LastHeard; !at.IsZero() && time.Since(at) < 0 || at.Year() > 1 && at.Year() < 2020 {
		t.Errorf("heard at %v", at)
	}
}

// Prepare says whether the plugin takes its configuration, before anything is
// followed; Run goes on with the same process, or with what went wrong.
func TestPrepare(t *testing.T) {
	t.Parallel()
	h, s := newHost(t), newSink()
	h.Hurry()
	prepare := func(sp supervisor.Spec) (*supervisor.Supervisor, error) {
		t.Helper()
		sup, err := supervisor.New(h, sp, s, slog.New(slog.DiscardHandler), supervisor.NewMetrics(prometheus.NewRegistry()))
		if err != nil {
			t.Fatal(err)
		}
		return sup, sup.Prepare(t.Context())
	}
	run := func(sup *supervisor.Supervisor, until func()) {
		t.Helper()
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- sup.Run(ctx) }() // ends with cancel
		until()
		cancel()
		if err := wait(t, "end of the supervisor", done); err != nil {
			t.Error(err)
		}
	}

	good := spec("remote", remoteConfig{Socket: filepath.Join(shortDir(t), "s")})
	sup, err := prepare(good)
	if err != nil {
		t.Fatal(err)
	}
	pid := sup.Status().PID
	if st := sup.Status(); st.Phase != supervisor.PhaseConfiguring || !testwait.Running(pid) || len(s.begun) != 0 {
		t.Errorf("status after Prepare: %+v, %d streams", st, len(s.begun))
	}
	run(sup, func() {
		wait(t, "stream", s.begun)
		if st := sup.Status(); st.PID != pid || st.Restarts != 0 {
			t.Errorf("status after Run: %+v", st)
		}
	})

	if sup, err = prepare(good); err != nil {
		t.Fatal(err)
	}
	pid = sup.Status().PID
	sup.Close()
	if st := sup.Status(); st.Phase != supervisor.PhaseStopped || st.PID != 0 || testwait.Running(pid) {
		t.Errorf("status after Close: %+v", st)
	}

	sup, err = prepare(spec("remote", remoteConfig{Socket: "x", Greeting: "rude"}))
	if e, ok := errors.AsType[*supervisor.ConfigError](err); !ok || len(e.Violations) != 1 {
		t.Errorf("Prepare: %v", err)
	}
	if st := sup.Status(); st.Phase != supervisor.PhaseFailed || st.PID != 0 || len(st.Violations) != 1 {
		t.Errorf("status after a configuration was refused: %+v", st)
	}
	sup.Close()

	if sup, err = prepare(spec("exits", struct{}{})); !errors.Is(err, supervisor.ErrExited) {
		t.Errorf("Prepare: %v", err)
	}
	if st := sup.Status(); st.Phase != supervisor.PhaseRestarting || st.PID != 0 || !strings.Contains(st.LastError, "cannot go on") {
		t.Errorf("status after the process ended: %+v", st)
	}
	run(sup, func() {
		for range 2 {
			if err := wait(t, "report", s.down); !errors.Is(err, supervisor.ErrExited) {
				t.Errorf("down: %v", err)
			}
		}
	})
}

// A plugin that does not say its handshake, or does not answer, shows as that
// while it is waited for.
func TestWaiting(t *testing.T) {
	t.Parallel()
	for role, want := range map[string]string{"silent": "no handshake for ", "hang-describe": "no answer to Describe for ", "hang-configure": "no answer to Configure for "} {
		t.Run(role, func(t *testing.T) {
			t.Parallel()
			h, s := newHost(t), newSink()
			sup, _ := start(t, h, spec(role, struct{}{}), s)
			eventually(t, want, func() bool {
				st := sup.Status()
				return strings.HasPrefix(st.Waiting, want) && strings.HasSuffix(st.Waiting, " s, of at most 10 s") && st.PID != 0 && testwait.Running(st.PID)
			})
		})
	}
}

// What an adapter prints or logs is in the bridge's log, with its level.
func TestLogs(t *testing.T) {
	t.Parallel()
	h, s := newHost(t), newSink()
	socket := filepath.Join(shortDir(t), "s")
	_, logs := start(t, h, spec("remote", remoteConfig{Socket: socket, Greeting: "print"}), s)
	wait(t, "stream", s.begun)
	for _, want := range []string{
		`level=INFO msg="printed to stdout" registry=test`,
		`level=INFO msg="printed to stderr" registry=test`,
		`level=WARN msg=logged registry=test number=7` + "\n",
		`level=INFO msg="{\"@level\":\"error\",\"@message\":5}"`,
	} {
		eventually(t, want, func() bool { return strings.Contains(logs.String(), want) })
	}
	for _, debug := range []string{"not to be seen", "printed by log"} {
		if strings.Contains(logs.String(), debug) {
			t.Errorf("%q crosses, although the log does not want debug records", debug)
		}
	}
}

// A configuration that the plugin refuses is shown with the field's path, by
// Check and in the status.
func TestViolations(t *testing.T) {
	t.Parallel()
	h, s := newHost(t), newSink()
	h.Hurry()
	socket := filepath.Join(shortDir(t), "s")
	sp := spec("remote", map[string]any{"sockte": socket, "wait": 5, "token": []string{"x"}})
	sp.Translate = []byte(`{"host":"{{.Nam}"}`)
	want := []supervisor.Violation{
		{Field: "config.socket", Reason: "is required"},
		{Field: "config.sockte", Reason: "unknown field; did you mean socket?"},
		{Field: "config.token", Reason: "must be a string, not a list"},
		{Field: "config.wait", Reason: "must be a string, not a number"},
	}
	got, _, err := supervisor.Check(t.Context(), h, sp, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 5 || got[4].Field != "translate.host" {
		t.Errorf("violations %v", got)
	} else if d := cmp.Diff(want, got[:4]); d != "" {
		t.Errorf("violations (-want +got):\n%s", d)
	}

	sup, _ := start(t, h, spec("remote", remoteConfig{Socket: socket, Greeting: "rude"}), s)
	for range 2 { // it is asked again
		var e *supervisor.ConfigError
		if err := wait(t, "report", s.down); !errors.As(err, &e) || len(e.Violations) != 1 ||
			e.Violations[0] != (supervisor.Violation{Field: "config.greeting", Reason: "be polite"}) {
			t.Errorf("down: %v", err)
		}
	}
	eventually(t, "phase failed", func() bool {
		st := sup.Status()
		return st.Phase == supervisor.PhaseFailed && len(st.Violations) == 1 && !st.RetryAt.IsZero()
	})
}

// A panic in the adapter's constructor is an error of Configure, not of the
// host.
func TestConfigurePanics(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	_, _, err := supervisor.Check(t.Context(), h, spec("remote", remoteConfig{Socket: "x", Greeting: "panic"}), slog.New(slog.DiscardHandler))
	if err == nil || err.Error() != "configure: the adapter panicked: greeted with panic" {
		t.Errorf("error %v", err)
	}
}

// Describe tells who the plugin is without a configuration.
func TestDescribe(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	d, err := supervisor.Describe(t.Context(), h, spec("remote", nil), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if d.Name != "remote" || d.Version != "1.2.3" || !bytes.Contains(d.ConfigSchema, []byte(`"default":"hello"`)) ||
		!bytes.Contains(d.TranslateSchema, []byte("namespace")) || len(d.Collections) != 3 {
		t.Errorf("%+v", d)
	}
	sp := spec("remote", nil)
	sp.Adapter = "other"
	if _, err := supervisor.Describe(t.Context(), h, sp, slog.New(slog.DiscardHandler)); !errors.Is(err, supervisor.ErrContract) {
		t.Errorf("a plugin of another name: %v", err)
	}
}

// An executable whose checksum is not the configured one is not started.
func TestChecksum(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	sp := spec("remote", nil)
	sp.SHA256 = strings.Repeat("ab", 32)
	if _, err := supervisor.Describe(t.Context(), h, sp, slog.New(slog.DiscardHandler)); !errors.Is(err, supervisor.ErrChecksum) {
		t.Errorf("wrong checksum: %v", err)
	}
	f, err := os.Open(os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	sum := sha256.New()
	if _, err := io.Copy(sum, f); err != nil {
		t.Fatal(err)
	}
	sp.SHA256 = hex.EncodeToString(sum.Sum(nil))
	if _, err := supervisor.Describe(t.Context(), h, sp, slog.New(slog.DiscardHandler)); err != nil {
		t.Errorf("right checksum: %v", err)
	}
	sp.SHA256 = "abc"
	if _, err := supervisor.New(h, sp, newSink(), slog.New(slog.DiscardHandler), nil); err == nil {
		t.Error("a checksum of three digits is accepted")
	}
	sp = spec("remote", nil)
	sp.Command = []string{filepath.Join(t.TempDir(), "missing")}
	if _, err := supervisor.Describe(t.Context(), h, sp, slog.New(slog.DiscardHandler)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing executable: %v", err)
	}
}

// A plugin goes when its host is killed, and the next host sweeps the directory
// of the killed one.
func TestHostKilled(t *testing.T) {
	t.Parallel()
	base := shortDir(t)
	socket := filepath.Join(shortDir(t), "s")
	cmd := exec.Command(os.Args[0], base, socket)
	cmd.Env = append(os.Environ(), roleKey+"=host")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil {
		t.Fatal(err)
	}
	if !testwait.Running(pid) {
		t.Fatal("the plugin does not run")
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	testwait.Gone(t, deadline, pid)

	if entries, _ := os.ReadDir(base); len(entries) != 1 {
		t.Fatalf("the killed host left %v", entries)
	}
	h, err := supervisor.NewHost(base, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	other, err := supervisor.NewHost(base, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if entries, _ := os.ReadDir(base); len(entries) != 2 {
		t.Errorf("after two new hosts there are %v", entries)
	}
	if err := errors.Join(h.Close(), other.Close()); err != nil {
		t.Error(err)
	}
}

// A socket directory whose path leaves no room for a socket's name is refused
// with the cure.
func TestLongDirectory(t *testing.T) {
	t.Parallel()
	_, err := supervisor.NewHost("/tmp/"+strings.Repeat("x", 100), slog.New(slog.DiscardHandler))
	if err == nil || !strings.Contains(err.Error(), "use a shorter one") {
		t.Errorf("error %v", err)
	}
}

// Pauses double from the smallest to the largest, less a jitter of up to a
// half, and begin anew after a healthy time.
func TestBackoff(t *testing.T) {
	t.Parallel()
	pause, refused := supervisor.Backoff()
	within := func(what string, got, least, most time.Duration) {
		t.Helper()
		if got < least || got > most {
			t.Errorf("%s: %v, want %v to %v", what, got, least, most)
		}
	}
	for i, most := range []time.Duration{200, 400, 800, 1600, 3200, 6400, 12800, 25600, 30000, 30000} {
		most *= time.Millisecond
		within(fmt.Sprint("pause ", i), pause(59*time.Second), most/2, most)
	}
	within("after a healthy minute", pause(time.Minute), 100*time.Millisecond, 200*time.Millisecond)
	within("refused", refused(), 54*time.Second, time.Minute)
}

// Every phase has a name and a sentence of its own.
func TestPhaseWords(t *testing.T) {
	t.Parallel()
	names, sentences := map[string]bool{}, map[string]bool{}
	all := append(supervisor.Phases(), supervisor.PhaseRestored, supervisor.PhaseRemovalPaused)
	for _, p := range all {
		names[p.String()], sentences[p.Sentence()] = true, true
	}
	if n := len(all); len(names) != n || len(sentences) != n {
		t.Errorf("%d phases, %d names, %d sentences", n, len(names), len(sentences))
	}
}

func FuzzParseLine(f *testing.F) {
	for _, s := range []string{"", "plain", "[WARN] x", `{"@level":"info","@message":"m","a":1}`, `{"@level":1,"@message":[]}`, `{"@level":"info"`, "{}", "null"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, line string) {
		level, msg, _, structured := supervisor.ParseLine(line)
		if !structured && !strings.Contains(line, msg) {
			t.Errorf("message %q of line %q at level %v", msg, line, level)
		}
	})
}

// BenchmarkWireBatches is batches of 1000 resources of 1000 bytes, from one
// process to the other.
func BenchmarkWireBatches(b *testing.B) {
	h, s := newHost(b), newSink()
	s.slow = make(chan struct{})
	sp := spec("flood", struct{}{})
	sp.Env = append(sp.Env, floodKey+"="+filepath.Join(b.TempDir(), "sent"))
	start(b, h, sp, s)
	wait(b, "stream", s.begun)
	s.slow <- struct{}{}
	b.SetBytes(1000 * 1000)
	for b.Loop() {
		s.slow <- struct{}{}
	}
	b.ReportMetric(float64(b.N*1000)/b.Elapsed().Seconds(), "resources/s")
	close(s.slow)
}

// BenchmarkWireChange is one changed instance of a service with 10, from the
// adapter's Set to the sink, one at a time. The command to the adapter is part
// of it; BenchmarkWireCommand is that alone.
func BenchmarkWireChange(b *testing.B) { benchmarkCommands(b, true) }

func BenchmarkWireCommand(b *testing.B) { benchmarkCommands(b, false) }

func benchmarkCommands(b *testing.B, change bool) {
	h, s := newHost(b), newSink()
	socket := filepath.Join(shortDir(b), "s")
	start(b, h, spec("remote", remoteConfig{Socket: socket}), s)
	wait(b, "stream", s.begun)
	tell(b, socket, command{Op: "set", Name: "web", Instances: 10}, command{Op: "synced"})
	s.until(b, "first listing", func(s *sink) bool { return s.synced == 1 })
	conn, err := net.Dial("unix", socket)
	if err != nil {
		b.Fatal(err)
	}
	defer conn.Close()
	in := bufio.NewReader(conn)
	i := 0
	for b.Loop() {
		i++
		cmd := command{Op: "nothing"}
		if change {
			cmd = command{Op: "set", Name: "web", Instances: 10, Change: 5 * (i % 2)}
		}
		s.mu.Lock()
		changed := s.changed
		s.mu.Unlock()
		if err := json.NewEncoder(conn).Encode(cmd); err != nil {
			b.Fatal(err)
		}
		if change {
			<-changed
		}
		if _, err := in.ReadString('\n'); err != nil {
			b.Fatal(err)
		}
	}
}

// Hosts that are made at the same time leave each other's directories alone.
func TestHostsAtOnce(t *testing.T) {
	t.Parallel()
	base, err := os.MkdirTemp("/tmp", "hosts")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(base) })
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			for range 200 {
				h, err := supervisor.NewHost(base, slog.New(slog.DiscardHandler))
				if err != nil {
					t.Error(err)
					return
				}
				if _, err := os.MkdirTemp(h.Dir(), "plugin"); err != nil {
					t.Errorf("a new host's directory: %v", err)
				}
				if err := h.Close(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	group.Wait()
}
