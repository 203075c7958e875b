package stream

import (
	"cmp"
	"context"
	"errors"
	"io"
	"log/slog"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/isthmus-mesh/isthmus/server/view"
)

// Stream is one end of a gRPC stream, a server's or a client's.
type Stream interface {
	Context() context.Context
	SendMsg(m any) error
	RecvMsg(m any) error
}

// Session is one stream as a state machine. Its methods but Status are called
// by one goroutine.
type Session interface {
	// Take takes a request. An error ends the stream.
	Take(req any, now time.Time) error
	// Next returns the next message to send. If there is none it returns nil
	// and how long to wait until it may be worth asking again although nothing
	// happened, 0 for ever. An error ends the stream.
	Next(now time.Time) (m *Message, wait time.Duration, err error)
	// Selective reports whether nothing but [Waker.Wake] and requests makes a
	// difference: no change of the state as such.
	Selective() bool
	// Close gives back what the session shares with others. The error is why
	// the stream ended.
	Close(now time.Time, err error)
	// Status returns the session as people want to see it.
	Status() Status
}

// Message is a response on its way: an encoded header, then encoded resources
// that are shared with other sinks. The order of fields means nothing in
// protobuf.
type Message struct {
	Header   []byte
	Segments [][]byte
}

// Parts implements wire.Spliced.
func (m *Message) Parts() (header []byte, segments [][]byte) { return m.Header, m.Segments }

// Waker wakes the loop of a stream.
type Waker chan struct{}

// NewWaker returns a waker.
func NewWaker() Waker { return make(Waker, 1) }

// Wake makes the loop look for something to send. It does not block.
func (w Waker) Wake() {
	select {
	case w <- struct{}{}:
	default: // it will look anyway
	}
}

// Fault ends a stream because of something that the sink did.
type Fault struct {
	Code codes.Code
	Err  error
}

// Error says what.
func (f *Fault) Error() string { return f.Err.Error() }

// Unwrap returns what.
func (f *Fault) Unwrap() error { return f.Err }

// ErrShutdown ends all streams when the server ends.
var ErrShutdown = status.Error(codes.Unavailable, "isthmus is shutting down; connect again")

// Server drives the streams of one protocol. Its methods may be called from any
// goroutine.
type Server struct {
	view     *view.View
	down     chan struct{} // closed by Shutdown
	downOnce sync.Once

	mu       sync.Mutex
	sessions map[Session]struct{} // guarded by mu
}

// NewServer returns a server without streams.
func NewServer(v *view.View) *Server {
	return &Server{view: v, down: make(chan struct{}), sessions: make(map[Session]struct{})}
}

// Shutdown ends all streams, after what was handed to gRPC already, and refuses
// new ones. It does not wait.
func (s *Server) Shutdown() { s.downOnce.Do(func() { close(s.down) }) }

// Down returns a channel that is closed by Shutdown.
func (s *Server) Down() <-chan struct{} { return s.down }

// Status returns all streams, the oldest first.
func (s *Server) Status() []Status {
	s.mu.Lock()
	sessions := make([]Session, 0, len(s.sessions))
	for sess := range s.sessions {
		sessions = append(sessions, sess)
	}
	s.mu.Unlock()
	out := make([]Status, 0, len(sessions))
	for _, sess := range sessions {
		out = append(out, sess.Status())
	}
	slices.SortFunc(out, func(a, b Status) int {
		return cmp.Or(a.Connected.Compare(b.Connected), cmp.Compare(a.Address, b.Address))
	})
	return out
}

// Serve drives a stream until it ends. The loop takes requests from receive,
// which reads one from the stream. The error is nil if the sink ended the
// stream, a [*Fault] if the server did because of it.
func (s *Server) Serve(st Stream, sess Session, wake Waker, receive func() (any, error)) error {
	s.mu.Lock()
	s.sessions[sess] = struct{}{}
	s.mu.Unlock()
	err := s.run(st, sess, wake, receive)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	s.mu.Lock()
	delete(s.sessions, sess)
	s.mu.Unlock()
	sess.Close(time.Now(), err)
	return err
}

func (s *Server) run(st Stream, sess Session, wake Waker, receive func() (any, error)) error {
	ctx := st.Context()
	requests := make(chan any)
	ended := make(chan error, 1)
	// Owned by this stream. It ends when gRPC ends the stream, which it does as
	// soon as the caller has returned or cancelled it; until then there is no
	// way to interrupt RecvMsg, so it is not waited for here.
	go func() {
		for {
			req, err := receive()
			if err != nil {
				ended <- err
				return
			}
			select {
			case requests <- req:
			case <-ctx.Done():
				return
			}
		}
	}()
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		var changed <-chan struct{}
		if !sess.Selective() {
			changed = s.view.Changed() // taken before looking, so that no change is missed
		}
		var timeout <-chan time.Time
		for {
			m, wait, err := sess.Next(time.Now())
			if err != nil {
				return &Fault{codes.Unavailable, err}
			}
			if m != nil {
				// Blocks while the sink does not read, which is this stream's
				// own affair.
				if err := st.SendMsg(m); err != nil {
					return err
				}
				continue
			}
			if wait > 0 {
				timer.Reset(wait)
				timeout = timer.C
			}
			break
		}
		select {
		case req := <-requests:
			if err := sess.Take(req, time.Now()); err != nil {
				return &Fault{codes.ResourceExhausted, err}
			}
		case <-changed:
		case <-wake:
		case <-timeout:
		case err := <-ended:
			return err
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		case <-s.down:
			return ErrShutdown
		}
	}
}

// LogEnd logs that a stream has ended, and why.
func LogEnd(log *slog.Logger, address string, err error) {
	switch {
	case err == nil, status.Code(err) == codes.Canceled, errors.Is(err, ErrShutdown):
		log.Info("sink disconnected", slog.String("address", address))
	default:
		log.Warn("stream ended", slog.String("address", address), slog.Any("err", err))
	}
}
