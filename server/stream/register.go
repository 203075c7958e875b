package stream

import (
	"cmp"
	"context"
	"slices"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/isthmus-mesh/isthmus/server/view"
)

// Entry is an open stream in the register of a [Server], from when a sink or
// the bridge opens it until its handler has returned. Each has one, and all who
// ask about streams, or end them, go by it:
//
//	                       sets                    asks
//	listener               the entry               which to end when it goes
//	rules of the listener  who it is, what it sees which the rules still allow
//	limits                 the account             -
//	[Server.Serve]         the session, trouble    -
//	pages, conditions      -                       status, trouble
type Entry struct {
	// Address is that of the sink.
	Address string

	server   *Server
	listener *Listener // nil for a sink that the bridge dials
	since    time.Time
	ctx      context.Context //nolint:containedctx // of the stream
	end      context.CancelCauseFunc
	account  Account      // used by the goroutines of the stream
	troubled atomic.Int64 // [Session.Troubled] in nanoseconds since 1970, 0 for never

	// guarded by server.mu
	admission Admission
	session   Session // nil before it begins and when it has ended
}

// Admission is why a stream is let in. Its methods may be called from any
// goroutine.
type Admission interface {
	// Identity returns who the sink is, as was verified; "" without a
	// credential.
	Identity() string
	// Views returns what the stream may see, and a channel that is closed when
	// that has changed.
	Views() (filters []view.Filter, changed <-chan struct{})
}

type entryKey struct{}

// EntryOf returns the entry of the stream of a context, nil if it has none.
func EntryOf(ctx context.Context) *Entry {
	e, _ := ctx.Value(entryKey{}).(*Entry)
	return e
}

// Enter registers a stream. The listener is nil for a sink that the bridge
// dials. The error is why new streams are refused.
func (s *Server) Enter(ctx context.Context, l *Listener) (*Entry, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.draining:
		return nil, ErrShutdown
	case l != nil && l.gone:
		return nil, ErrListenerRemoved
	}
	ctx, end := context.WithCancelCause(ctx)
	e := &Entry{server: s, listener: l, since: time.Now(), end: end, account: Unbounded(), admission: unbounded{}}
	if p, ok := peer.FromContext(ctx); ok {
		e.Address = p.Addr.String()
	}
	e.ctx = context.WithValue(ctx, entryKey{}, e)
	s.entries[e] = struct{}{}
	if l != nil {
		l.entries[e] = struct{}{}
	}
	return e, nil
}

// Leave ends the stream and removes it from the register.
func (e *Entry) Leave() {
	e.end(nil)
	e.server.mu.Lock()
	defer e.server.mu.Unlock()
	delete(e.server.entries, e)
	if e.listener != nil {
		delete(e.listener.entries, e)
	}
}

// Context returns the context of the stream. It ends with the stream, and has
// the entry.
func (e *Entry) Context() context.Context { return e.ctx }

// End ends the stream. If the cause is a status, the sink receives it.
func (e *Entry) End(cause error) { e.end(cause) }

// SetAdmission says why the stream is let in.
func (e *Entry) SetAdmission(a Admission) {
	e.server.mu.Lock()
	defer e.server.mu.Unlock()
	e.admission = a
}

// SetAccount bounds what the stream may have. It is called before
// [Server.Serve].
func (e *Entry) SetAccount(a Account) { e.account = a }

// Identity returns that of the admission. The entry may be nil.
func (e *Entry) Identity() string {
	if e == nil {
		return ""
	}
	return e.admitted().Identity()
}

func (e *Entry) admitted() Admission {
	e.server.mu.Lock()
	defer e.server.mu.Unlock()
	return e.admission
}

func (e *Entry) setSession(sess Session) {
	e.server.mu.Lock()
	defer e.server.mu.Unlock()
	e.session = sess
}

// tell records [Session.Troubled].
func (e *Entry) tell(from time.Time) {
	if from.IsZero() {
		e.troubled.Store(0)
	} else {
		e.troubled.Store(from.UnixNano())
	}
}

// Listener is where sinks open streams.
type Listener struct {
	// Name is its field and address, such as "listen.xds 127.0.0.1:15051".
	Name   string
	server *Server

	// guarded by server.mu
	gone    bool
	entries map[*Entry]struct{}
}

// Listener returns a listener whose streams are in the register.
func (s *Server) Listener(name string) *Listener {
	return &Listener{Name: name, server: s, entries: make(map[*Entry]struct{})}
}

// Stream is the first gRPC interceptor of the listener: it registers a stream.
func (l *Listener) Stream(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	e, err := l.server.Enter(ss.Context(), l)
	if err != nil {
		return err
	}
	defer e.Leave()
	err = next(srv, &registered{ss, e})
	if cause := context.Cause(e.ctx); cause != nil {
		if _, ok := status.FromError(cause); ok {
			return cause
		}
	}
	return err
}

// registered is a stream with the context of its entry.
type registered struct {
	grpc.ServerStream
	entry *Entry
}

// Context implements [grpc.ServerStream].
func (r *registered) Context() context.Context { return r.entry.ctx }

// Admissions returns why the streams of the listener are let in.
func (l *Listener) Admissions() (all []Admission) {
	l.server.mu.Lock()
	defer l.server.mu.Unlock()
	for e := range l.entries {
		all = append(all, e.admission)
	}
	return all
}

// Drain refuses new streams of the listener, and ends those that there are as
// [Server.Drain] does.
func (l *Listener) Drain(over time.Duration) {
	l.server.mu.Lock()
	defer l.server.mu.Unlock()
	if !l.gone {
		l.gone = true
		drain(l.entries, over, ErrListenerRemoved)
	}
}

// Drain refuses new streams, and ends those that there are one after the other,
// the last of them after the given time: the sinks do not come back all at once
// to wherever they go. Until then they get what changes, and then what was
// already handed to gRPC. It does not wait. A second call has no effect.
func (s *Server) Drain(over time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.draining {
		s.draining = true
		close(s.down)
		drain(s.entries, over, ErrShutdown)
	}
}

// drain ends streams one after the other.
func drain(all map[*Entry]struct{}, over time.Duration, cause error) {
	after := time.Duration(0)
	for e := range all {
		if after += over / time.Duration(len(all)); after > 0 {
			time.AfterFunc(after, func() { e.End(cause) })
		} else {
			e.End(cause)
		}
	}
}

// Down returns a channel that is closed when new streams are refused.
func (s *Server) Down() <-chan struct{} { return s.down }

// Len returns the number of sessions.
func (s *Server) Len() (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for e := range s.entries {
		if e.session != nil {
			n++
		}
	}
	return n
}

// Status returns the status of all sessions, the oldest first.
func (s *Server) Status() []Status { return s.status(func(*Entry) bool { return true }) }

// Troubled returns the status of the sessions whose sinks are in trouble, the
// oldest first.
func (s *Server) Troubled(now time.Time) []Status {
	return s.status(func(e *Entry) bool {
		from := e.troubled.Load()
		return from != 0 && from <= now.UnixNano()
	})
}

func (s *Server) status(of func(*Entry) bool) []Status {
	open := make(map[*Entry]Session)
	s.mu.Lock()
	for e := range s.entries {
		if e.session != nil && of(e) {
			open[e] = e.session
		}
	}
	s.mu.Unlock()
	out := make([]Status, 0, len(open))
	for e, sess := range open {
		st := Status{Address: e.Address, Identity: e.Identity(), Connected: e.since}
		sess.Status(&st)
		out = append(out, st)
	}
	slices.SortFunc(out, func(a, b Status) int {
		return cmp.Or(a.Connected.Compare(b.Connected), cmp.Compare(a.Address, b.Address))
	})
	return out
}
