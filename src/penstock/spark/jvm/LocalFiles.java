package penstock.spark;

import java.io.IOException;
import java.nio.channels.FileChannel;
import java.nio.file.Files;
import java.nio.file.StandardOpenOption;
import java.nio.file.attribute.PosixFilePermissions;
import org.apache.hadoop.fs.LocalFileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.RawLocalFileSystem;
import org.apache.hadoop.fs.permission.FsPermission;

/**
 * Hadoop's file system of this machine, but the mode of a file is set by Java.
 *
 * Without Hadoop's native library, which Spark from PyPI has not, Hadoop starts the program chmod for each file that it
 * makes: four times in a micro-batch, and for each file that a table gets.
 *
 * Files that are copied to it are on disk when the copy returns: RocksDB's files in a checkpoint.
 */
public final class LocalFiles extends LocalFileSystem {
    public LocalFiles() {
        super(new Raw());
    }

    @Override
    public void copyFromLocalFile(boolean deleteSource, Path source, Path target) throws IOException {
        super.copyFromLocalFile(deleteSource, source, target);
        if (Files.isRegularFile(pathToFile(target).toPath())) {
            sync(pathToFile(target).toPath());
            java.nio.file.Path checksum = pathToFile(getChecksumFile(target)).toPath();
            if (Files.exists(checksum)) {
                sync(checksum); // an incomplete one would make the file unreadable
            }
            sync(pathToFile(target.getParent()).toPath());
            sync(pathToFile(target.getParent().getParent()).toPath()); // the copy may have created the directory
        }
    }

    /** Writes the contents of a file, or the entries of a directory, to the disk. */
    static void sync(java.nio.file.Path path) throws IOException {
        try (FileChannel channel = FileChannel.open(path, StandardOpenOption.READ)) {
            channel.force(true);
        }
    }

    static final class Raw extends RawLocalFileSystem {
        private static final int PERMISSION_BITS = 9;

        @Override
        public void setPermission(Path path, FsPermission mode) throws IOException {
            if (mode.toShort() >> PERMISSION_BITS != 0) {
                super.setPermission(path, mode); // Java knows no sticky bit
                return;
            }
            String text = mode.getUserAction().SYMBOL + mode.getGroupAction().SYMBOL + mode.getOtherAction().SYMBOL;
            Files.setPosixFilePermissions(pathToFile(path).toPath(), PosixFilePermissions.fromString(text));
        }
    }
}
