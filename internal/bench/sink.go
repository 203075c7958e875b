package bench

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// newHistogram returns one that counts times from a microsecond to an hour, in
// nanoseconds.
func newHistogram() *hdrhistogram.Histogram {
	return hdrhistogram.New(1000, time.Hour.Nanoseconds(), 3)
}

// latencies counts the times of all sinks.
type latencies struct {
	keep bool // each arrival

	mu       sync.Mutex // guards everything below
	h        *hdrhistogram.Histogram
	arrivals []arrival
}

// arrival is that of a change at a sink.
type arrival struct{ stamp, at int64 }

func (l *latencies) record(stamp, at int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	record(l.h, at-stamp)
	if l.keep {
		l.arrivals = append(l.arrivals, arrival{stamp, at})
	}
}

func record(h *hdrhistogram.Histogram, ns int64) {
	_ = h.RecordValue(min(max(ns, 1000), time.Hour.Nanoseconds())) // within its bounds
}

// window is the time in which changes count, in nanoseconds since 1970.
type window struct{ from, to atomic.Int64 }

// open lets changes count that are made from a time on.
func (w *window) open(from time.Time, d time.Duration) {
	w.to.Store(from.Add(d).UnixNano())
	w.from.Store(from.UnixNano())
}

func (w *window) has(stamp int64) bool {
	from := w.from.Load()
	return from > 0 && stamp >= from && stamp < w.to.Load()
}

// sink is one stream that acknowledges all that it gets.
type sink struct {
	protocol protocol
	names    []string // asked for, nil for everything

	window *window
	// since is when the sink began; what it lists first may carry times before.
	since int64
	// heard is when the last response of any sink arrived.
	heard *atomic.Int64

	latency *latencies

	mu        sync.Mutex // guards everything below
	have      map[string]uint64
	last      map[string]int64 // the last time of a change that was counted, by resource, where one has the times of several instances
	responses int64
	bytes     int64
	updates   int64
	oldest    int64 // time of a change that arrived, 0 for none
	failed    error
}

func newSink(p protocol, names []string, w *window, l *latencies, heard *atomic.Int64) *sink {
	return &sink{
		protocol: p, names: names, window: w, since: time.Now().UnixNano(), latency: l, heard: heard, have: map[string]uint64{}, last: map[string]int64{},
	}
}

// run receives until ctx ends or the stream does.
func (s *sink) run(ctx context.Context, conn *grpc.ClientConn) {
	err := s.receive(ctx, conn)
	s.mu.Lock()
	defer s.mu.Unlock()
	if ctx.Err() == nil {
		s.failed = err
	}
}

func (s *sink) receive(ctx context.Context, conn *grpc.ClientConn) error {
	stream, err := s.protocol.open(ctx, conn, s.names)
	if err != nil {
		return err
	}
	for {
		var b []byte
		if err := stream.RecvMsg(&b); err != nil {
			return err
		}
		at := time.Now().UnixNano()
		r, err := s.protocol.parse(b)
		if err != nil {
			return fmt.Errorf("a response cannot be read: %w", err)
		}
		if err := stream.SendMsg(s.protocol.ack(&r)); err != nil && ctx.Err() == nil {
			return err
		}
		s.take(at, int64(len(b)), &r)
		s.heard.Store(at)
	}
}

// take records a response.
func (s *sink) take(at, size int64, r *response) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.responses++
	s.bytes += size
	count := func(stamp int64) {
		if stamp >= s.since && (s.oldest == 0 || stamp < s.oldest) {
			s.oldest = stamp
		}
		if s.window.has(stamp) {
			s.updates++
			s.latency.record(stamp, at)
		}
	}
	if r.whole {
		maps.DeleteFunc(s.have, func(name string, _ uint64) bool { return typeOf(name) == r.typ })
	}
	var found []int64
	for _, resource := range r.resources {
		key := r.typ + " " + s.protocol.nameOf(resource)
		s.have[key] = digestOf(resource)
		found = stamps(found[:0], resource)
		// One instance has one time, perhaps in two places; a service has those
		// of all its instances.
		slices.Sort(found)
		found = slices.Compact(found)
		if s.protocol.whole && len(found) > 0 {
			last := s.last[key]
			s.last[key] = found[len(found)-1]
			found = slices.DeleteFunc(found, func(stamp int64) bool { return stamp <= last })
		}
		for _, stamp := range found {
			count(stamp)
		}
	}
	for _, name := range r.removed {
		delete(s.have, r.typ+" "+string(name))
	}
}

// typeOf returns the type of a key of sink.have.
func typeOf(key string) string {
	for i := range key {
		if key[i] == ' ' {
			return key[:i]
		}
	}
	return key
}

// size is the number of resources that the sink holds.
func (s *sink) size() (n int, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.have), s.failed
}

// restart forgets what was counted.
func (s *sink) restart() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.responses, s.bytes, s.updates = 0, 0, 0
}

// differences returns the number of resources that the sink holds otherwise
// than another sink of its protocol that asks for everything.
func (s *sink) differences(of *sink) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	of.mu.Lock()
	defer of.mu.Unlock()
	for name, digest := range of.have {
		if have, ok := s.have[name]; have != digest && (ok || s.names == nil) {
			n++
		}
	}
	for name := range s.have {
		if _, ok := of.have[name]; !ok {
			n++
		}
	}
	if s.names != nil {
		n += max(0, len(s.names)-len(s.have))
	}
	return n
}

// perConnection is the number of sinks that share a connection if there are
// more than perConnection of them.
const perConnection = 100

// dial returns a connection for each of n sinks.
func dial(address string, n int) (conns []*grpc.ClientConn, hangUp func() error, err error) {
	share := 1
	if n > perConnection {
		share = perConnection
	}
	var all []*grpc.ClientConn
	hangUp = func() (err error) {
		for _, c := range all {
			err = errors.Join(err, c.Close())
		}
		return err
	}
	for i := range n {
		if i%share == 0 {
			c, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()),
				grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(math.MaxInt32)),
				grpc.WithInitialWindowSize(8<<20), grpc.WithInitialConnWindowSize(8<<20))
			if err != nil {
				return nil, nil, errors.Join(err, hangUp())
			}
			all = append(all, c)
		}
		conns = append(conns, all[len(all)-1])
	}
	return conns, hangUp, nil
}
