package access

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/clip"
)

const (
	// auditRefusals is how many refused attempts of one network are recorded in
	// a minute. The next line of it says how many were not.
	auditRefusals = 30
	// maxAnswered bounds what is recorded of an answer, in bytes.
	maxAnswered = 300
)

// Results of what is recorded.
const (
	AuditDone    = "done"
	AuditRefused = "refused"
	AuditFailed  = "failed"
)

// Audit records who changed something, or was refused: as JSON lines of a file,
// or without one as lines of the log. Its methods may be called on nil.
type Audit struct {
	log *slog.Logger

	mu   sync.Mutex
	file *os.File // guarded by mu, as the rest; nil without one
	path string
	told map[netip.Prefix]*refusals
}

// refusals are those of a network within a minute.
type refusals struct {
	since         time.Time
	told, omitted int
}

// NewAudit returns an audit that goes to a log, whatever its level is.
func NewAudit(log *slog.Logger) *Audit {
	return &Audit{log: log, told: make(map[netip.Prefix]*refusals)}
}

// SetFile has the audit go to a file, or to the log for "". Before an error
// nothing changes.
func (a *Audit) SetFile(path string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	var file *os.File
	if path != "" {
		var err error
		if file, err = openAudit(path); err != nil {
			return err
		}
	}
	if a.file != nil {
		_ = a.file.Close() // each line was written
	}
	a.file, a.path = file, path
	return nil
}

// Close closes the file.
func (a *Audit) Close() { _ = a.SetFile("") }

func openAudit(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
}

// Write implements [io.Writer] for the lines of a file. The file may be renamed
// or removed at any time, as logrotate does; a line is never in two.
func (a *Audit) writeLocked(line []byte) error {
	now, err := os.Stat(a.path)
	if is, own := a.file.Stat(); err != nil || own != nil || !os.SameFile(now, is) {
		next, err := openAudit(a.path)
		if err != nil {
			return err
		}
		_ = a.file.Close() // each line was written
		a.file = next
	}
	n, err := a.file.Write(line)
	if err == nil && n < len(line) {
		err = io.ErrShortWrite
	}
	return err
}

// lines is the file as a writer.
type lines struct{ *Audit }

// Write implements io.Writer.
func (l lines) Write(line []byte) (int, error) { return len(line), l.writeLocked(line) }

// Record records a change, or an attempt.
func (a *Audit) Record(who, from, action, result string, more ...slog.Attr) {
	if a == nil {
		return
	}
	r := slog.NewRecord(time.Now(), slog.LevelInfo, "audit", 0)
	if who == "" {
		who = "anonymous"
	}
	r.AddAttrs(slog.String("who", who), slog.String("from", from), slog.String("action", action), slog.String("result", result))
	r.AddAttrs(more...)
	a.mu.Lock()
	defer a.mu.Unlock()
	if result == AuditRefused {
		omitted, tell := a.boundLocked(from)
		if !tell {
			return
		}
		if omitted > 0 {
			r.AddAttrs(slog.Int("omitted", omitted))
		}
	}
	err := errNoFile
	if a.file != nil {
		err = slog.NewJSONHandler(lines{a}, nil).Handle(context.Background(), r)
	}
	if err != nil {
		// Not by the logger, whose level may leave it out.
		if !errors.Is(err, errNoFile) {
			a.log.Error("the audit file cannot be written; its lines go here", "err", err)
		}
		_ = a.log.Handler().Handle(context.Background(), r)
	}
}

var errNoFile = errors.New("there is no audit file")

// boundLocked reports whether a refusal is recorded, and how many were not.
func (a *Audit) boundLocked(from string) (omitted int, tell bool) {
	key := Network(hostOf(from))
	now := time.Now()
	t := a.told[key]
	if t == nil || now.Sub(t.since) >= time.Minute {
		if t != nil {
			omitted = t.omitted
		} else if len(a.told) >= maxSpared {
			clear(a.told)
		}
		t = &refusals{since: now}
		a.told[key] = t
	}
	if t.told >= auditRefusals {
		t.omitted++
		return 0, false
	}
	t.told++
	return omitted, true
}

// hostOf returns the address of host:port, or of a host.
func hostOf(address string) netip.Addr {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		host = address
	}
	a, _ := netip.ParseAddr(host) // invalid on a unix socket
	return a
}

// answered is a response of which the status and an error are recorded.
type answered struct {
	responseWriter
	code int
	text []byte
}

// WriteHeader implements http.ResponseWriter.
func (a *answered) WriteHeader(code int) {
	if a.code == 0 {
		a.code = code
	}
	a.responseWriter.WriteHeader(code)
}

// Write implements http.ResponseWriter.
func (a *answered) Write(b []byte) (int, error) {
	if a.code == 0 {
		a.code = 200
	}
	if a.code >= 400 && len(a.text) < maxAnswered {
		a.text = append(a.text, b[:min(len(b), maxAnswered-len(a.text))]...)
	}
	return a.responseWriter.Write(b)
}

// Unwrap is for http.ResponseController.
func (a *answered) Unwrap() responseWriter { return a.responseWriter }

// result returns the result of a request with a status.
func (a *answered) result() string {
	switch a.code {
	case 0, 200, 201, 202, 204:
		return AuditDone
	case 401, 403, 405, 421, 429:
		return AuditRefused
	}
	return AuditFailed
}

// Note has the audit say what a request was about, such as "level=debug".
func Note(ctx context.Context, detail string) {
	if d, ok := ctx.Value(detailKey{}).(*string); ok {
		*d = clip.Text(detail, maxAnswered)
	}
}

type detailKey struct{}
