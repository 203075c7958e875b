package supervisor

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/isthmus-mesh/isthmus/internal/clip"
)

// Bounds on the logged output of a plugin. The stack of a goroutine fits into
// one line, the first goroutines of a panic into two.
const (
	// maxLine bounds a logged line, in bytes; the rest is dropped.
	maxLine = 16 << 10
	// maxLines bounds the logged lines per plugin and second; others are
	// counted.
	maxLines = 500
	// maxBytes bounds the logged bytes per plugin and second, except for the
	// first line.
	maxBytes = 64 << 10
	// maxLast bounds the part of the last plain line that is shown when the
	// process ends, in bytes.
	maxLast = 300
)

// logPump logs a plugin's output.
type logPump struct {
	log     *slog.Logger
	counter prometheus.Counter // of dropped lines; may be nil

	mu sync.Mutex
	// guarded by mu
	window  time.Time // start of the current second
	lines   int       // logged in the window
	bytes   int       // of these lines
	dropped int       // lines dropped in the window
	lost    int       // bytes dropped, including those of truncated lines
	panics  bool      // inside a panic's stack
	words   string    // first line of a panic, else the last line that is plain or of level error
}

func newLogPump(log *slog.Logger) *logPump { return &logPump{log: log} }

// last returns the most useful line of the output after the process ended, ""
// if there is none.
func (l *logPump) last() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.words
}

// copy logs the lines of r until EOF.
func (l *logPump) copy(r io.Reader, stream string) {
	w := l.stream(stream)
	_, _ = io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{r}, make([]byte, 2*maxLine)) // an error ends it
	w.flush()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.reportLocked()
}

// stream returns a writer that logs each line.
func (l *logPump) stream(name string) *lineWriter { return &lineWriter{logs: l, stream: name} }

// lineWriter splits its input into lines and buffers at most [maxLine] bytes of
// one.
type lineWriter struct {
	logs   *logPump
	stream string
	line   []byte // start of an incomplete line
	lost   int    // bytes of it that were dropped
}

var _ io.Writer = (*lineWriter)(nil)

// Write implements io.Writer.
func (w *lineWriter) Write(b []byte) (int, error) {
	n := len(b)
	for len(b) > 0 {
		end := bytes.IndexByte(b, '\n')
		part := b
		if end >= 0 {
			part = b[:end]
		}
		keep := min(len(part), maxLine-len(w.line))
		w.line = append(w.line, part[:keep]...)
		w.lost += len(part) - keep
		if end < 0 {
			break
		}
		w.flush()
		b = b[end+1:]
	}
	return n, nil
}

// flush logs an incomplete line.
func (w *lineWriter) flush() {
	if len(w.line) > 0 {
		w.logs.add(strings.ToValidUTF8(strings.TrimRight(string(w.line), "\r"), "\uFFFD"), w.lost, w.stream)
	}
	w.line, w.lost = w.line[:0], 0
}

// allowLocked reports whether a line of the given size may be logged.
func (l *logPump) allowLocked(size int) bool {
	if now := time.Now(); now.Sub(l.window) >= time.Second {
		l.reportLocked()
		l.window, l.lines, l.bytes = now, 0, 0
	}
	if l.lines >= maxLines || l.lines > 0 && l.bytes+size > maxBytes {
		return false
	}
	l.lines++
	l.bytes += size
	return true
}

func (l *logPump) reportLocked() {
	if l.dropped > 0 || l.lost > 0 {
		l.log.Warn("the plugin logs too much; the rest was left out", "lines", l.dropped, "bytes", l.lost)
		l.dropped, l.lost = 0, 0
	}
}

// add logs a line that was truncated by lost bytes.
func (l *logPump) add(line string, lost int, stream string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	level, msg, attrs, structured := parseLine(line)
	if !structured {
		if strings.TrimSpace(line) == "" {
			return
		}
		first := strings.HasPrefix(line, "panic: ") || strings.HasPrefix(line, "fatal error: ")
		if first {
			l.panics = true
		}
		if l.panics {
			level = slog.LevelError
		}
		if stream == "stdout" {
			attrs = append(attrs, slog.String("stream", stream))
		}
		if first || !l.panics {
			l.words = clip.Text(line, maxLast)
		}
	} else if level >= slog.LevelError {
		l.words = clip.Text(msg, maxLast)
		for _, a := range attrs {
			if a.Key == "err" {
				l.words = clip.Text(msg+": "+a.Value.String(), maxLast)
			}
		}
	}
	ctx := context.Background()
	if !l.log.Enabled(ctx, level) {
		return
	}
	// Quoting makes a line longer.
	size := len(line)
	if !structured {
		size = len(strconv.Quote(line))
	}
	if !l.allowLocked(size) {
		l.dropped++
		l.lost += len(line) + lost
		if l.counter != nil {
			l.counter.Inc()
		}
		return
	}
	if lost > 0 {
		l.lost += lost
		msg += "..."
	}
	l.log.LogAttrs(ctx, level, msg, attrs...)
}

// parseLine parses the JSON of hclog and the SDK; any other line is plain. It
// never panics.
func parseLine(line string) (level slog.Level, msg string, attrs []slog.Attr, structured bool) {
	var fields map[string]any
	if strings.HasPrefix(line, "{") && json.Unmarshal([]byte(line), &fields) == nil {
		name, okLevel := fields["@level"].(string)
		msg, okMsg := fields["@message"].(string)
		if okLevel && okMsg {
			for _, k := range slices.Sorted(maps.Keys(fields)) {
				switch {
				case strings.HasPrefix(k, "@"), k == "registry", k == "adapter": // set by the bridge's logger
				default:
					attrs = append(attrs, slog.Any(k, fields[k]))
				}
			}
			return levelOf(name), msg, attrs, true
		}
	}
	for prefix, level := range map[string]slog.Level{
		"[TRACE]": slog.LevelDebug,
		"[DEBUG]": slog.LevelDebug,
		"[INFO]":  slog.LevelInfo,
		"[WARN]":  slog.LevelWarn,
		"[ERROR]": slog.LevelError,
	} {
		if rest, ok := strings.CutPrefix(line, prefix); ok {
			return level, strings.TrimSpace(rest), nil, false
		}
	}
	return slog.LevelInfo, line, nil, false
}

func levelOf(name string) slog.Level {
	switch strings.ToLower(name) {
	case "trace", "debug":
		return slog.LevelDebug
	case "warn", "warning":
		return slog.LevelWarn
	case "error", "fatal", "panic":
		return slog.LevelError
	}
	return slog.LevelInfo
}
