package stream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"runtime/debug"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/isthmus-mesh/isthmus/server/view"
	"github.com/isthmus-mesh/isthmus/server/wire"
)

// Stream is one end of a gRPC stream, the server's or the client's.
type Stream interface {
	Context() context.Context
	SendMsg(m any) error
	RecvMsg(m any) error
}

// Session is the state machine of one stream. One goroutine calls its methods;
// Status may be called from any.
type Session interface {
	// Take decodes and handles a request. An error ends the stream.
	Take(req *wire.Request, now time.Time) error
	// Next returns the next message to send. With nothing to send it returns
	// nil and the time after which to call it again; 0 waits for an event. An
	// error ends the stream.
	Next(now time.Time) (m *Message, wait time.Duration, err error)
	// Retained returns how many bytes are kept of what the sink has sent.
	Retained() int
	// Room returns about how large the next response may be, in bytes, 0 if
	// there is none, and whether it is of pages that sinks share.
	Room() (size int, shared bool)
	// Selective reports whether only requests and [Waker.Wake] can produce a
	// message. The loop then ignores other changes of the state.
	Selective() bool
	// Waker returns what makes the loop call Next.
	Waker() Waker
	// SetView continues the session with another view.
	SetView(v *view.View)
	// Close releases what the session shares with others. The error is why the
	// stream ended.
	Close(now time.Time, err error)
	// Status completes the status for pages and the API, which has what the
	// register knows.
	Status(st *Status)
	// Troubled returns from when on the sink is in trouble unless it answers:
	// see [Subscription.Troubled]. It is zero for never.
	Troubled() time.Time
}

// Message is one response: an encoded header, then encoded resources that are
// shared with other sinks. Protobuf allows fields in any order.
type Message struct {
	Header   []byte
	Segments [][]byte
	// Size is the length of Header and Segments, in bytes.
	Size int
	// Shared is set if other sinks may have the same segments.
	Shared bool
	// Done, if set, is called when gRPC has sent the message or dropped it,
	// from any goroutine. It is not called for one that is small, nor when gRPC
	// closes the connection.
	Done func()
}

// Parts implements wire.Spliced.
func (m *Message) Parts() (header []byte, segments [][]byte) { return m.Header, m.Segments }

// Sent implements wire.Tracked.
func (m *Message) Sent() func() { return m.Done }

// Waker wakes the loop of one stream.
type Waker chan struct{}

// NewWaker returns a waker.
func NewWaker() Waker { return make(Waker, 1) }

// Wake makes the loop call [Session.Next]. It does not block.
func (w Waker) Wake() {
	select {
	case w <- struct{}{}:
	default: // the loop is about to call Next
	}
}

// Fault is an error that the sink caused. It ends the stream.
type Fault struct {
	Code codes.Code
	Err  error
}

// Error implements error.
func (f *Fault) Error() string { return f.Err.Error() }

// Unwrap returns the cause.
func (f *Fault) Unwrap() error { return f.Err }

// GRPCStatus returns what the sink receives.
func (f *Fault) GRPCStatus() *status.Status { return status.New(f.Code, f.Error()) }

// ErrShutdown ends all streams when the server shuts down.
var ErrShutdown = status.Error(codes.Unavailable, "isthmus is shutting down; connect again")

// ErrListenerRemoved ends the streams of a listener that a reload removed.
var ErrListenerRemoved = status.Error(codes.Unavailable, "this listener is no longer in the configuration of isthmus; connect to another one")

// TooFast is the error for a stream of a peer that opens streams faster than
// any sink does.
func TooFast() error {
	return status.Error(codes.Unavailable, "too many streams are opened from this address; try again")
}

// TooManyConnections refuses a stream on one connection of an identity beyond
// the limit.
func TooManyConnections(limit int) error {
	return status.Error(codes.ResourceExhausted, fmt.Sprintf("this identity has streams on as many connections as limits.connections_per_peer allows (%d); raise it, or open them on fewer", limit))
}

// TooMany refuses a stream beyond the limit of streams.
func TooMany(limit int) error {
	return status.Error(codes.ResourceExhausted, fmt.Sprintf("the bridge has as many streams as limits.streams allows (%d); raise it, or spread the sinks over several bridges", limit))
}

// Server runs streams, of one protocol or several, and has the register of
// those that are open. Its methods may be called from any goroutine.
type Server struct {
	view *view.View
	down chan struct{} // closed by Drain

	mu       sync.Mutex
	draining bool                // guarded by mu
	entries  map[*Entry]struct{} // guarded by mu
}

// NewServer returns a server without streams.
func NewServer(v *view.View) *Server {
	return &Server{view: v, down: make(chan struct{}), entries: make(map[*Entry]struct{})}
}

// lightRequest is the size up to which a request is light, in bytes: it
// acknowledges a response, or has a dozen names.
const lightRequest = 1 << 10

// LargeResponse is the size from which a response counts as a first one, or as
// one to a request of many names.
const LargeResponse = 64 << 10

// Account bounds what a stream may have of the bridge. The goroutines of the
// stream call its methods.
type Account interface {
	// Await waits until the sink may send another request. The one before is
	// handled.
	Await(ctx context.Context)
	// Received tells the size of a request, and may wait before it is handled.
	Received(ctx context.Context, size int)
	// Turn waits before the stream looks at a change of the state. What changes
	// meanwhile comes with it.
	Turn(ctx context.Context)
	// Retain tells how many bytes are kept of what the sink has sent. An error
	// ends the stream.
	Retain(bytes int) error
	// Room reserves room for the next response, until it is sent or Done is
	// called. If there is none it returns a channel that is closed when Room is
	// to be called again.
	Room(size int, shared bool) <-chan struct{}
	// Done gives back what Room reserved, as there is nothing to send.
	Done()
	// Send tells a message that is sent next. It may set Message.Done.
	Send(m *Message)
	// Work waits for the turn to handle a request, or to make a large response,
	// and returns what ends it. One that is light is to wait for none, unless
	// there are too many of them. The error is that of ctx.
	Work(ctx context.Context, light bool) (end func(), err error)
}

// Unbounded returns the account of a stream that may have anything.
func Unbounded() Account { return unbounded{} }

// unbounded is also the admission of a stream that may see anything.
type unbounded struct{}

func (unbounded) Identity() string                              { return "" }
func (unbounded) Views() (all []view.Filter, _ <-chan struct{}) { return nil, nil }

func (unbounded) Await(context.Context)          {}
func (unbounded) Received(context.Context, int)  {}
func (unbounded) Turn(context.Context)           {}
func (unbounded) Retain(int) error               { return nil }
func (unbounded) Room(int, bool) <-chan struct{} { return nil }
func (unbounded) Done()                          {}
func (unbounded) Send(*Message)                  {}

func (unbounded) Work(context.Context, bool) (end func(), err error) { return func() {}, nil }

// Serve runs a stream until it ends, and registers it unless that has been
// done. The session that open returns begins with a view that may show more
// than the stream may see, and has the right one before its first request. The
// error is nil if the sink ended the stream, and a [*Fault] if the sink caused
// the end.
func (s *Server) Serve(st Stream, open func(*Entry) Session) error {
	e := EntryOf(st.Context())
	if e == nil {
		var err error
		if e, err = s.Enter(st.Context(), nil); err != nil {
			return err
		}
		defer e.Leave()
	}
	sess := open(e)
	e.setSession(sess)
	err := s.run(e, st, sess)
	switch cause := context.Cause(e.ctx); {
	case errors.Is(cause, ErrShutdown):
		err = cause
	case errors.Is(err, io.EOF):
		err = nil
	}
	e.setSession(nil)
	// To forget many names takes as long as to handle them, and what the sink
	// asks for next waits for it.
	ended, _ := e.account.Work(context.WithoutCancel(e.ctx), sess.Retained() <= LargeResponse)
	sess.Close(time.Now(), err)
	ended()
	return err
}

func (s *Server) run(e *Entry, st Stream, sess Session) error {
	ctx, account := e.ctx, e.account
	filters, regrant := e.admitted().Views()
	shown, release := s.view.Narrow(filters...)
	sess.SetView(shown)
	defer func() { release() }()
	requests, handled := make(chan *wire.Request), make(chan struct{}, 1)
	ended := make(chan error, 1)
	// The stream owns this goroutine. It ends when gRPC ends the stream, right
	// after the caller has returned or cancelled. RecvMsg cannot be interrupted
	// earlier, so Serve does not wait for it.
	go func() {
		for {
			req := new(wire.Request)
			account.Await(ctx)
			if err := sound(func() error { return st.RecvMsg(req) }); err != nil {
				ended <- err
				return
			}
			account.Received(ctx, req.Size())
			select {
			case requests <- req:
			case <-ctx.Done():
				return
			}
			select {
			case <-handled: // it counts as received until then
			case <-ctx.Done():
				return
			}
		}
	}()
	var timer *time.Timer // most streams never need one
	defer func() {
		if timer != nil {
			timer.Stop()
		}
	}()
	turns := make(chan turn)
	var req *wire.Request
	for {
		// A stack that has grown stays as it is while a quarter of it is used,
		// and this goroutine waits under all of gRPC's frames. What needs much
		// stack runs in one that ends, so that a stream takes 8 kB less.
		go func() { turns <- e.takeTurn(st, sess, shown, req) }()
		now := <-turns
		if now.err != nil {
			return now.err
		}
		if req != nil {
			handled <- struct{}{}
			req = nil
		}
		var timeout <-chan time.Time
		if now.wait > 0 {
			if timer == nil {
				timer = time.NewTimer(now.wait)
			} else {
				timer.Reset(now.wait)
			}
			timeout = timer.C
		}
		select {
		case req = <-requests:
		case <-now.changed:
			account.Turn(ctx)
		case <-now.room:
		case <-regrant:
			filters, regrant = e.admitted().Views()
			now, releaseNow := s.view.Narrow(filters...)
			sess.SetView(now)
			release()
			shown, release = now, releaseNow
		case <-sess.Waker():
		case <-timeout:
		case err := <-ended:
			return err
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		}
	}
}

// sound calls what receives or handles a request. A panic there, which is a
// defect of the bridge, is the error of this stream: nothing else has seen the
// request.
func sound(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = &defect{fmt.Errorf("the request meets a defect of the bridge: %v", p), string(debug.Stack())}
		}
	}()
	return f()
}

// defect is a panic of the bridge.
type defect struct {
	error
	stack string
}

// turn is what a stream waits for next, besides requests.
type turn struct {
	changed <-chan struct{} // a change of the state; nil for none
	room    <-chan struct{} // room for a response; nil for none
	wait    time.Duration   // 0 for none
	err     error           // ends the stream
}

// takeTurn handles a request, if there is one, and sends what there is to send.
func (e *Entry) takeTurn(st Stream, sess Session, shown *view.View, req *wire.Request) (t turn) {
	defer func() { e.tell(sess.Troubled()) }()
	ctx, account := e.ctx, e.account
	if req != nil {
		end, err := account.Work(ctx, req.Size() <= lightRequest)
		if err != nil {
			return turn{err: status.FromContextError(err).Err()}
		}
		err = sound(func() error { return sess.Take(req, time.Now()) })
		end()
		if fault, ok := errors.AsType[*Fault](err); ok {
			return turn{err: fault}
		}
		if err != nil {
			return turn{err: &Fault{codes.ResourceExhausted, err}}
		}
		if err := account.Retain(sess.Retained()); err != nil {
			return turn{err: &Fault{codes.ResourceExhausted, err}}
		}
	}
	if !sess.Selective() {
		t.changed = shown.Changed() // read before Next, so that no change is missed
	}
	for {
		size, shared := sess.Room()
		if size > 0 {
			if t.room = account.Room(size, shared); t.room != nil {
				t.changed = nil // what changes until then comes with it
				return t
			}
		}
		end := func() {}
		if size >= LargeResponse && !shared { // pages are there, or are made once for all
			var err error
			if end, err = account.Work(ctx, false); err != nil {
				return turn{err: status.FromContextError(err).Err()}
			}
		}
		m, wait, err := sess.Next(time.Now())
		end()
		if m == nil {
			account.Done()
		}
		if err != nil {
			return turn{err: &Fault{codes.Unavailable, err}}
		}
		if m == nil {
			if size, _ := sess.Room(); size == 0 {
				t.changed = nil // nothing can be sent before the sink has answered
			}
			t.wait = wait
			return t
		}
		if err := account.Retain(sess.Retained()); err != nil {
			return turn{err: &Fault{codes.ResourceExhausted, err}}
		}
		e.tell(sess.Troubled())
		account.Send(m)
		// Blocks this stream only, while the sink does not read.
		if err := st.SendMsg(m); err != nil {
			if m.Done != nil {
				m.Done()
			}
			return turn{err: err}
		}
	}
}

// LogEnd logs the end of a stream with its reason.
func LogEnd(log *slog.Logger, err error) {
	if d, ok := errors.AsType[*defect](err); ok {
		log.Error("the bridge has met a defect of its own and goes on", "doing", "handle a request", "err", d.Error(), "stack", d.stack)
		return
	}
	switch {
	case err == nil, status.Code(err) == codes.Canceled, errors.Is(err, ErrShutdown):
		log.Info("sink disconnected")
	default:
		log.Warn("stream ended", slog.Any("err", err))
	}
}
