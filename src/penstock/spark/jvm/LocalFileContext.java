package penstock.spark;

import java.io.IOException;
import java.net.URI;
import java.net.URISyntaxException;
import java.nio.file.FileSystemException;
import java.nio.file.Files;
import java.nio.file.StandardCopyOption;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.ChecksumFs;
import org.apache.hadoop.fs.DelegateToFileSystem;
import org.apache.hadoop.fs.FileAlreadyExistsException;
import org.apache.hadoop.fs.Path;

/**
 * LocalFiles for Spark's checkpoint manager, which uses another interface of Hadoop than tables do.
 *
 * A rename that must not replace a file is a hard link: of two drivers that write the same file of a checkpoint, one
 * fails. Hadoop's own class checks first whether the file exists, and then renames.
 */
public final class LocalFileContext extends ChecksumFs {
    public LocalFileContext(URI uri, Configuration settings) throws IOException, URISyntaxException {
        super(new Raw(settings));
    }

    private static final class Raw extends DelegateToFileSystem {
        Raw(Configuration settings) throws IOException, URISyntaxException {
            super(URI.create("file:///"), new LocalFiles.Raw(), settings, "file", false);
        }

        @Override
        public int getUriDefaultPort() {
            return -1; // there is no port
        }

        @Override
        public boolean isValidName(String name) {
            return true; // the operating system decides
        }

        @Override
        public void renameInternal(Path from, Path to, boolean overwrite) throws IOException {
            java.nio.file.Path source = file(from);
            java.nio.file.Path target = file(to);
            if (!Files.isRegularFile(source)) {
                super.renameInternal(from, to, overwrite);
            } else if (overwrite) {
                Files.move(source, target, StandardCopyOption.ATOMIC_MOVE);
            } else {
                link(source, target);
                Files.delete(source);
            }
        }

        private static void link(java.nio.file.Path source, java.nio.file.Path target) throws IOException {
            try {
                Files.createLink(target, source);
            } catch (java.nio.file.FileAlreadyExistsException error) {
                throw new FileAlreadyExistsException(target + " exists");
            } catch (UnsupportedOperationException | FileSystemException error) {
                // Some mounted file systems have no links: there, two drivers may both succeed.
                if (Files.exists(target)) {
                    throw new FileAlreadyExistsException(target + " exists");
                }
                Files.copy(source, target);
            }
        }

        private static java.nio.file.Path file(Path path) {
            return java.nio.file.Path.of(path.toUri().getPath());
        }
    }
}
