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
)

// Bounds of what a plugin's output adds to the log. A goroutine's stack fits into a line, and the first goroutines of a panic
// into a second.
const (
	// maxLine is how much of a line is logged, in bytes; the rest of it is left out.
	maxLine = 16 << 10
	// maxLines is the number of lines of one plugin that are logged in a second; the others are counted.
	maxLines = 500
	// maxBytes is the number of bytes of one plugin's lines that are logged in a second; the first line is logged in any case.
	maxBytes = 64 << 10
	// maxLast is how much of the last plain line is shown when the process ends, in bytes.
	maxLast = 300
)

// logPump puts a plugin's output into the log.
type logPump struct {
	log     *slog.Logger
	counter prometheus.Counter // of lines that are not logged; may be nil

	mu sync.Mutex
	// guarded by mu
	window  time.Time // beginning of the present second
	lines   int       // logged in it
	bytes   int       // of these lines
	dropped int       // not logged in it
	lost    int       // bytes of these, and of what was left out of long lines
	panics  bool      // a panic's stack is being printed
	words   string    // the first line of a panic, else the last line of level error or plain
}

func newLogPump(log *slog.Logger) *logPump { return &logPump{log: log} }

// last returns what a person should see first when the process ended, "" if it said nothing.
func (l *logPump) last() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.words
}

// copy logs each line of r, up to its end.
func (l *logPump) copy(r io.Reader, stream string) {
	w := l.stream(stream)
	_, _ = io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{r}, make([]byte, 2*maxLine)) // an error is its end
	w.flush()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.reportLocked()
}

// stream returns a writer that logs each line that is written to it.
func (l *logPump) stream(name string) *lineWriter { return &lineWriter{logs: l, stream: name} }

// lineWriter cuts what is written into lines and keeps no more than [maxLine] bytes of one.
type lineWriter struct {
	logs   *logPump
	stream string
	line   []byte // the beginning of a line that has not ended
	lost   int    // how much of it is left out
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

// flush logs the line as far as it got.
func (w *lineWriter) flush() {
	if len(w.line) > 0 {
		w.logs.add(strings.ToValidUTF8(strings.TrimRight(string(w.line), "\r"), "\uFFFD"), w.lost, w.stream)
	}
	w.line, w.lost = w.line[:0], 0
}

// allowLocked reports whether another line of a size may be logged.
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

// add logs a line, of which the given number of bytes was left out.
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
			l.words = clip(line, maxLast)
		}
	} else if level >= slog.LevelError {
		l.words = clip(msg, maxLast)
		for _, a := range attrs {
			if a.Key == "err" {
				l.words = clip(msg+": "+a.Value.String(), maxLast)
			}
		}
	}
	ctx := context.Background()
	if !l.log.Enabled(ctx, level) {
		return
	}
	// What is quoted in the log takes more there than the plugin wrote.
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

func clip(s string, limit int) string {
	if len(s) <= limit {
		return s
	}
	return strings.ToValidUTF8(s[:limit], "") + "..."
}

// parseLine understands the JSON that hclog and the SDK write; everything else is a plain line. Nothing in a line can make it
// panic.
func parseLine(line string) (level slog.Level, msg string, attrs []slog.Attr, structured bool) {
	var fields map[string]any
	if strings.HasPrefix(line, "{") && json.Unmarshal([]byte(line), &fields) == nil {
		name, okLevel := fields["@level"].(string)
		msg, okMsg := fields["@message"].(string)
		if okLevel && okMsg {
			for _, k := range slices.Sorted(maps.Keys(fields)) {
				switch {
				case strings.HasPrefix(k, "@"), k == "registry", k == "adapter": // the bridge's logger has them
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
