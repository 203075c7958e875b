package zookeeper

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// Operations of the protocol (ZooDefs.OpCode of the server).
const (
	opExists      int32 = 3
	opGetData     int32 = 4
	opSync        int32 = 9
	opPing        int32 = 11
	opGetChildren int32 = 8
	opAuth        int32 = 100
	opSASL        int32 = 102
	opAddWatch    int32 = 106
	opClose       int32 = -11
)

// Transaction ids of messages that answer no request, and of requests whose
// answer has a fixed one.
const (
	xidEvent int32 = -1
	xidPing  int32 = -2
	xidAuth  int32 = -4
)

// Types of events (Watcher.Event.EventType).
const (
	eventCreated  int32 = 1
	eventDeleted  int32 = 2
	eventData     int32 = 3
	eventChildren int32 = 4
)

// watchBelow is the mode of a watch that stays, and is for everything below its
// path too (AddWatchMode).
const watchBelow int32 = 1

const (
	// maxFrame bounds a message of the server, in bytes. A server's own bound
	// for what is written is a megabyte; lists of names may be longer.
	maxFrame = 64 << 20
	// maxValue bounds the data of a node, in bytes. Instances are some hundred
	// bytes; the metadata of a large application is some 100 kB.
	maxValue = 4 << 20
)

// code is an error of the protocol (KeeperException.Code).
type code int32

const (
	codeUnimplemented code = -6
	codeNoNode        code = -101
	codeNoAuth        code = -102
	codeAuthFailed    code = -115
	codeNeedsAuth     code = -124
)

var codeTexts = map[code]string{
	-1: "system error", -2: "runtime inconsistency", -3: "data inconsistency", -4: "connection loss", -5: "marshalling error",
	codeUnimplemented: "not implemented", -7: "operation timeout", -8: "bad arguments", codeNoNode: "no such node", codeNoAuth: "not authorized",
	-112: "session expired", codeAuthFailed: "authentication failed", -118: "session moved", codeNeedsAuth: "the server wants SASL authentication",
	-125: "quota exceeded", -127: "throttled",
}

// Error implements error.
func (c code) Error() string {
	if text, ok := codeTexts[c]; ok {
		return text
	}
	return fmt.Sprintf("error %d", int32(c))
}

// errNotZooKeeper reports an answer that is none of the protocol.
var errNotZooKeeper = errors.New("the answer is none of ZooKeeper")

// readFrame reads one message, which may have most bytes.
func readFrame(r io.Reader, most int) ([]byte, error) {
	var size [4]byte
	if _, err := io.ReadFull(r, size[:]); err != nil {
		return nil, err
	}
	n := int64(int32(binary.BigEndian.Uint32(size[:])))
	if n < 0 || n > int64(most) {
		return nil, fmt.Errorf("%w: a message has %d bytes", errNotZooKeeper, n)
	}
	b := make([]byte, n)
	if _, err := io.ReadFull(r, b); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return nil, err
	}
	return b, nil
}

// writer makes one message, with room for its length.
type writer []byte

func newWriter() writer { return make(writer, 4, 64) }

func (w *writer) int(v int32)    { *w = binary.BigEndian.AppendUint32(*w, uint32(v)) }
func (w *writer) long(v int64)   { *w = binary.BigEndian.AppendUint64(*w, uint64(v)) }
func (w *writer) bytes(v []byte) { w.int(int32(len(v))); *w = append(*w, v...) } //nolint:gosec // paths and credentials of the configuration
func (w *writer) string(v string) {
	w.bytes([]byte(v))
}

func (w *writer) bool(v bool) {
	if v {
		*w = append(*w, 1)
	} else {
		*w = append(*w, 0)
	}
}

// frame returns the message with its length.
func (w *writer) frame() []byte {
	binary.BigEndian.PutUint32(*w, uint32(len(*w)-4)) //nolint:gosec // as above
	return *w
}

// reader reads the parts of a message. What is read behind its end is zero, and
// err is set.
type reader struct {
	b   []byte
	err error
}

func (r *reader) next(n int) []byte {
	if r.err != nil || n < 0 || n > len(r.b) {
		r.err = errNotZooKeeper
		return nil
	}
	part := r.b[:n]
	r.b = r.b[n:]
	return part
}

func (r *reader) int() int32 {
	if b := r.next(4); b != nil {
		return int32(binary.BigEndian.Uint32(b)) //nolint:gosec // two's complement
	}
	return 0
}

func (r *reader) long() int64 {
	if b := r.next(8); b != nil {
		return int64(binary.BigEndian.Uint64(b)) //nolint:gosec // two's complement
	}
	return 0
}

// bytes reads bytes with their number, of which -1 is none.
func (r *reader) bytes() []byte {
	n := r.int()
	if n == -1 || r.err != nil {
		return nil
	}
	return r.next(int(n))
}

func (r *reader) string() string { return string(r.bytes()) }

// strings reads a list of texts.
func (r *reader) strings() []string {
	n := int(r.int())
	if n <= 0 || r.err != nil {
		return nil
	}
	if n > len(r.b)/4 { // each has its length
		r.err = errNotZooKeeper
		return nil
	}
	all := make([]string, 0, n)
	for range n {
		all = append(all, r.string())
	}
	return all
}

// message is one message of the server.
type message struct {
	xid  int32
	zxid int64
	code code
	body reader
}

// parseMessage reads the header of a message.
func parseMessage(b []byte) (message, error) {
	r := reader{b: b}
	m := message{xid: r.int(), zxid: r.long(), code: code(r.int())}
	m.body = r
	return m, r.err
}

// event is a change of a node that is watched.
type event struct {
	kind int32
	path string
}

// parseEvent reads the body of a message with xidEvent.
func parseEvent(r reader) (event, error) {
	e := event{kind: r.int()}
	_ = r.int() // the state of the session: connected, if it can be sent
	e.path = r.string()
	return e, r.err
}

// connected is the answer to the first message of a connection.
type connected struct {
	timeout int32 // in milliseconds; 0: the session is refused
	session int64
}

// parseConnected reads it.
func parseConnected(b []byte) (connected, error) {
	r := reader{b: b}
	_ = r.int() // version of the protocol
	c := connected{timeout: r.int(), session: r.long()}
	_ = r.bytes() // secret to resume the session with, which is never done
	if r.err == nil && (c.timeout < 0 || c.timeout == 0 && c.session != 0) {
		r.err = errNotZooKeeper
	}
	return c, r.err
}
